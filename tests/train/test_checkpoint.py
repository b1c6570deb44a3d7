"""A checkpoint exists completely or not at all, whatever happens while it is written."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.io.checkpoints import list_checkpoints, verify_files
from gecko.parallel.mesh import Ranks
from gecko.train import Run, train
from gecko.train.checkpoints import MANIFEST, Checkpointer, keep_newest, latest_checkpoint, write_checkpoint
from gecko.train.metrics import DataRecord


def write(folder: Path, step: int, content: bytes = b"weights") -> Path:
    def files(target: Path) -> None:
        (target / "model.bin").write_bytes(content)
        (target / "state.json").write_text(json.dumps({"step": step}))

    return write_checkpoint(folder, step, files)


@pytest.mark.parametrize(("keep_every", "left"), [(None, [8, 10]), (4, [4, 8, 10])])
def test_what_was_passed_over_does_not_count_as_newest(tmp_path: Path, keep_every: int | None, left: list[int]) -> None:
    """A run that found step 12 damaged resumed from step 8 and wrote step 10; both of these stay."""
    for step in (2, 4, 8, 12):
        write(tmp_path, step)
    (tmp_path / "step-00000012" / "model.bin").write_bytes(b"")
    newest = write(tmp_path, 10)
    keep_newest(tmp_path, 10, 2, keep_every)
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in left]
    assert latest_checkpoint(tmp_path) == newest


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_and_names_the_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    sound, damaged = write(folder, 1), write(folder, 2)
    file = data.draw(st.sampled_from([damaged / "model.bin", damaged / "state.json"]))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="step-00000002.*" + file.name):
        assert latest_checkpoint(folder) == sound


@pytest.mark.parametrize("name", ["model.bin", MANIFEST])
@pytest.mark.parametrize("change", ["missing", "cut"])
def test_incomplete_checkpoints_are_skipped(tmp_path: Path, name: str, change: str) -> None:
    sound, damaged = write(tmp_path, 1), write(tmp_path, 2)
    if change == "missing":
        (damaged / name).unlink()
    else:
        os.truncate(damaged / name, 5)
    with pytest.warns(UserWarning, match=name):
        assert latest_checkpoint(tmp_path) == sound


def test_all_damaged_is_an_error_not_a_new_start(tmp_path: Path) -> None:
    (write(tmp_path, 1) / "model.bin").write_bytes(b"WEIGHTS")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="step-00000001 are damaged"):
        latest_checkpoint(tmp_path)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make writes beyond ``size`` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_while_a_model_is_saved(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stops with a clear error, and resumes from the checkpoint before once there is space."""
    from gecko.models.gecko import Gecko

    save, saves = Gecko.save, []

    def save_until_full(self: Gecko, folder: Path) -> None:
        saves.append(folder)
        with files_of_at_most(10_000 if len(saves) == 2 else resource.RLIM_INFINITY):
            save(self, folder)

    monkeypatch.setattr(Gecko, "save", save_until_full)
    with pytest.raises(OSError, match=r"step 8 could not be written .*step-00000004, is intact.*--resume"):
        train(small_run)
    assert [path.name for path in list_checkpoints(small_run.folder / "checkpoints")] == ["step-00000004"]
    assert train(small_run, resume=True).finished


_WRITER = """
import os, sys
from pathlib import Path
from gecko.train.checkpoints import write_checkpoint, keep_newest
folder = Path(sys.argv[1])
for step in range(10**6):
    write_checkpoint(folder, step, lambda target: [(target / n).write_bytes(os.urandom(200_000)) for n in "abc"])
    keep_newest(folder, step, 2)
"""


def test_kill_while_saving_never_leaves_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Kill a process that only saves, at a random moment."""
    process = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)])
    end = time.monotonic() + 60
    while len(list_checkpoints(tmp_path)) < 2:
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)
    for moment in range(12):
        time.sleep(0.013 + 0.003 * moment)
        process.send_signal(signal.SIGSTOP)
        found = list_checkpoints(tmp_path)
        assert found
        for path in found:
            verify_files(path)
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    write(tmp_path, 10**7)
    assert not list(tmp_path.glob(".partial-*"))


def test_a_slow_disk_is_no_hang(small_run: Run) -> None:
    beat = Mock()
    with ThreadPoolExecutor(1) as disk, Checkpointer(small_run, Ranks(), beat, DataRecord("", 2)) as saver:
        saver._writing = disk.submit(time.sleep, 1.2)
        saver.wait()
    assert beat.call_count >= 1
