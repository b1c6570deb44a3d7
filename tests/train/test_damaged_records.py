"""Damaged or unwritable metrics files are named and repaired, and no step is lost."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gecko.train import Run, train
from gecko.train.metrics import SESSIONS, MetricsWriter, read_metrics, read_sessions

METRICS = "metrics.jsonl"


def steps(run: Run) -> list[int]:
    return [record["step"] for record in read_metrics(run.folder / METRICS) if record["kind"] == "train"]


@pytest.mark.parametrize("tail", [b'{"step": 4, "comm', b'{"step": 4}', b"\xff\xfe"], ids=["torn", "no end", "no text"])
def test_a_torn_line_of_the_sessions_does_not_stop_a_later_resume(small_run: Run, tail: bytes) -> None:
    train(replace(small_run, steps=2))
    with (small_run.folder / SESSIONS).open("ab") as file:
        file.write(tail)
    for end in (4, 6):
        assert train(replace(small_run, steps=end), resume=True).step == end
    assert [session["step"] for session in read_sessions(small_run.folder) if "version" in session] == [0, 2, 4]
    assert not (small_run.folder / f"{SESSIONS}.damaged").exists(), "nothing was lost"


def test_a_damaged_line_of_the_sessions_is_named_and_the_run_goes_on(small_run: Run) -> None:
    train(replace(small_run, steps=2))
    path = small_run.folder / SESSIONS
    path.write_bytes(b"{broken\n" + path.read_bytes())
    before = path.read_bytes()
    with pytest.warns(UserWarning, match=rf"{path}, line 1, must be a JSON object.*sessions\.jsonl\.damaged"):
        assert train(small_run, resume=True).finished
    assert [session["step"] for session in read_sessions(small_run.folder)] == [0, 2]
    assert path.with_name(f"{SESSIONS}.damaged").read_bytes() == before


@pytest.mark.parametrize(
    "line", [b"\xff\xfe{}", b'{"loss": 1.0}', b"{broken", b"[1]", b"", b"\0\0\0\0"],
    ids=["no text", "no step", "no JSON", "a list", "empty", "zeros"],
)  # fmt: skip
def test_a_damaged_line_of_the_numbers_is_named_and_the_run_goes_on(small_run: Run, line: bytes) -> None:
    train(replace(small_run, steps=6))
    path = small_run.folder / METRICS
    lines = path.read_bytes().split(b"\n")
    lines[3] = line
    path.write_bytes(b"\n".join(lines))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 4, must be a JSON object"):
        read_metrics(path)
    with (
        pytest.warns(UserWarning, match=rf"{path}, line 4, must be a JSON object.*metrics\.jsonl\.damaged"),
        pytest.warns(UserWarning, match="has no numbers of 1 of the 6 steps so far, 3 to 3"),
    ):
        assert train(small_run, resume=True).finished
    assert steps(small_run) == [1, 2, *range(4, 13)]
    assert path.with_name(f"{METRICS}.damaged").read_bytes() == before


def test_lost_lines_are_told(small_run: Run) -> None:
    train(replace(small_run, steps=6))
    path = small_run.folder / METRICS
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    with pytest.warns(UserWarning, match="has no numbers of 2 of the 6 steps so far, 5 to 6"):
        assert train(small_run, resume=True).finished


@pytest.fixture
def full_disk() -> Path:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    return full


def test_a_full_disk_between_checkpoints_names_file_and_step(
    small_run: Run, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MetricsWriter.write

    def writing(self: MetricsWriter, kind: Any, step: int, values: Any) -> None:
        if step == 7:
            monkeypatch.setattr(self, "_file", full_disk.open("ab", buffering=0))
            monkeypatch.setattr(self, "_keep", lambda: None)
        write(self, kind, step, values)

    monkeypatch.setattr(MetricsWriter, "write", writing)
    with pytest.raises(
        OSError, match=rf"step 7 could not be written to {small_run.folder / METRICS}: No space.*--resume"
    ):
        train(small_run)
    monkeypatch.undo()
    assert train(small_run, resume=True).finished
    assert steps(small_run) == list(range(1, 13))


def test_without_room_for_tensorboard_the_run_goes_on(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter
    traces: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", traces.append)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "write", refuse)
    monkeypatch.setattr(writer, "flush", refuse)
    with pytest.warns(UserWarning, match=r"tensorboard could not be written at step \d+ \(No space") as found:
        assert train(small_run).finished
    assert sum("TensorBoard gets no more" in str(warning.message) for warning in found) == 1
    assert steps(small_run) == list(range(1, 13)) and not traces


def test_a_file_in_place_of_the_checkpoints_is_named(small_run: Run) -> None:
    small_run.folder.mkdir()
    (small_run.folder / "checkpoints").write_text("a file")
    with warnings.catch_warnings(), pytest.raises(FileExistsError, match=r"checkpoints must be a folder.*it is a file"):
        train(small_run)
    assert not (small_run.folder / METRICS).exists()
