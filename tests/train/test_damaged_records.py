"""Metrics that are damaged, and files that are lost."""

import errno
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import curve, killed, same_end, steps_in, stop_after

import gecko
from gecko.experiments.compare.runs import progress_of
from gecko.io.checkpoints import MANIFEST, read_manifest, verify_files
from gecko.io.model_folder import CONFIG, WEIGHTS
from gecko.train import Run, TrainResult, train
from gecko.train.checkpoints import flushed_entries, write_manifest, write_model
from gecko.train.metrics import METRICS, SESSIONS, MetricsWriter, read_metrics, read_sessions

# ---- Damaged or unwritable metrics files are named and repaired, and no step is lost.


def steps(run: Run) -> list[int]:
    return [record["step"] for record in steps_in(run.folder)]


@pytest.mark.parametrize("tail", [b'{"step": 4, "comm', b'{"step": 4}', b"\xff\xfe"], ids=["torn", "no end", "no text"])
def test_a_torn_line_of_the_sessions_does_not_stop_a_later_resume(finished: Run, tail: bytes) -> None:
    with (finished.folder / SESSIONS).open("ab") as file:
        file.write(tail)
    for end in (13, 14):
        assert train(replace(finished, steps=end), resume=True).step == end
    assert [session["step"] for session in read_sessions(finished.folder) if "version" in session] == [0, 12, 13]
    assert not (finished.folder / f"{SESSIONS}.damaged").exists(), "nothing was lost"


def test_a_damaged_line_of_the_sessions_is_named_and_the_run_goes_on(finished: Run) -> None:
    path = finished.folder / SESSIONS
    path.write_bytes(b"{broken\n" + path.read_bytes())
    before = path.read_bytes()
    with pytest.warns(UserWarning, match=rf"{path}, line 1, must be a JSON object.*sessions\.jsonl\.damaged"):
        assert train(finished, resume=True).finished
    assert [session["step"] for session in read_sessions(finished.folder)] == [0, 12]
    assert path.with_name(f"{SESSIONS}.damaged").read_bytes() == before


def test_a_damaged_line_of_the_numbers_is_named_and_the_run_goes_on(finished: Run) -> None:
    path = finished.folder / METRICS
    whole = path.read_bytes().split(b"\n")
    for line in (b"\xff\xfe{}", b'{"loss": 1.0}', b"{broken", b"[1]", b"", b"\0\0\0\0"):
        path.write_bytes(b"\n".join([*whole[:3], line, *whole[4:]]))
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 4, must be a JSON object"):
            read_metrics(path)
    before = path.read_bytes()
    with (
        pytest.warns(UserWarning, match=rf"{path}, line 4, must be a JSON object.*metrics\.jsonl\.damaged"),
        pytest.warns(UserWarning, match="has no numbers of 1 of the 12 steps so far, 3 to 3"),
    ):
        assert train(replace(finished, steps=14), resume=True).finished
    assert steps(finished) == [1, 2, *range(4, 15)]
    assert path.with_name(f"{METRICS}.damaged").read_bytes() == before


LINES = [
    *({"kind": "train", "step": step, "loss": 1.0} for step in (None, "x", "3", -1, 1.5, True, [3])),
    *({"kind": "train", "step": 3, "loss": loss} for loss in ("1", [1.0], False)),
    *({"kind": kind, "step": 3, "loss": 1.0} for kind in (None, 3, ["train"])),
]


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_line_whose_fields_are_of_other_kinds_is_damaged(finished: Run, line: dict[str, Any]) -> None:
    """To all readers: the run, the display of a comparison, and whoever reads the numbers."""
    path = finished.folder / METRICS
    shown = progress_of(finished)
    with path.open("a") as file:
        file.write(json.dumps({"tokens_per_second": 1.0, "nats_per_byte": 1.0, **line}) + "\n")
    with pytest.raises(ValueError, match=rf"{path}, line \d+, must be a JSON object whose (kind|step|loss) is a"):
        read_metrics(path)
    assert progress_of(finished) == shown
    with pytest.warns(UserWarning, match=r"must be a JSON object whose .*metrics\.jsonl\.damaged"):
        assert train(finished, resume=True).finished
    assert steps(finished) == list(range(1, 13))


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", [METRICS, SESSIONS, "config.json", "recipe.json", "results.json"])
def test_a_folder_in_place_of_a_record_is_named(finished: Run, name: str, resume: bool) -> None:
    (finished.folder / name).unlink()
    (finished.folder / name / "inner").mkdir(parents=True)
    said = rf"{finished.folder}(/{name} .*folder| already holds a run)"
    with pytest.raises((ValueError, FileExistsError), match=said):
        train(replace(finished, steps=14), resume=resume)


def test_a_full_disk_between_checkpoints_names_file_and_step(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (full_disk := Path("/dev/full")).exists():
        pytest.skip("needs /dev/full")
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
    with pytest.raises(FileExistsError, match=r"checkpoints must be a folder.*it is a file"):
        train(small_run)
    assert not (small_run.folder / METRICS).exists()


# ---- The config of a run, which it writes for others to read, and those of its checkpoints.


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the config of a checkpoint, and its manifest with it, or of a run."""
    path = folder / CONFIG
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields, indent=2) + "\n")
    if (folder / MANIFEST).is_file():
        write_manifest(folder, {**read_manifest(folder), **flushed_entries(folder, [path])})


@pytest.mark.parametrize("lacking", [["bfloat16_window"], ["sinks", "unit_vectors"], ["architectures", "model_type"]])
def test_a_run_of_an_earlier_version_goes_on_after_every_kill(
    small_run: Run, whole: TrainResult, lacking: list[str]
) -> None:
    """This version writes more fields: first to the run's own config, then to that of the next checkpoint."""
    killed(6, small_run)
    checkpoint = small_run.folder / "checkpoints" / "step-00000004"
    for folder in (small_run.folder, checkpoint):
        rewrite(folder, lambda fields: [fields.pop(name) for name in lacking])
    for step in (5, 6, 10):
        killed(step, small_run, resume=True)
        assert gecko.load(small_run.folder).config == small_run.model
    assert same_end(train(small_run, resume=True), whole)


def test_a_checkpoint_of_an_earlier_version_is_joined(finished: Run) -> None:
    checkpoint = finished.folder / "checkpoints" / "step-00000012"
    rewrite(checkpoint, lambda fields: fields.pop("sinks"))
    write_manifest(checkpoint, {name: x for name, x in read_manifest(checkpoint).items() if name != WEIGHTS})
    write_model(checkpoint, checkpoint)
    verify_files(checkpoint)
    assert gecko.load(finished.folder).config == finished.model


CONFIG_DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda x: x[: len(x) // 2], "empty": lambda _: b"", "no text": lambda _: b"\xff", "a folder": lambda _: None,
    "a list": lambda _: b"[]", "no fields": lambda _: b"{}",
    "other digits": lambda x: x.replace(b"257", b"258"),
}  # fmt: skip


@pytest.mark.parametrize("damage", CONFIG_DAMAGES)
@pytest.mark.parametrize("place", ["newest", "both", "run"])
def test_a_damaged_config_is_named_for_what_it_is(finished: Run, whole: TrainResult, damage: str, place: str) -> None:
    """That of the run is written again; a checkpoint with a damaged one is damaged, and none of another model."""
    if (damage, place) == ("other digits", "run"):
        damage = "cut"  # with other digits it would be that of another model
    steps = {"run": [], "newest": [12], "both": [8, 12]}[place]
    folders = [finished.folder / "checkpoints" / f"step-{step:08d}" for step in steps] or [finished.folder]
    for path in (folder / CONFIG for folder in folders):
        content = CONFIG_DAMAGES[damage](path.read_bytes())
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
    if place == "both":
        for resume in (lambda: gecko.load(finished.folder), lambda: train(finished, resume=True)):
            with pytest.warns(UserWarning, match="skipping"), pytest.raises(ValueError, match="must hold an undamaged"):
                resume()
        return
    skipped = pytest.warns(UserWarning, match="skipping the checkpoint step-00000012: .*config.json")
    with skipped if place == "newest" else nullcontext():
        gecko.load(finished.folder)
    if place == "run" and damage == "a folder":
        with pytest.raises(FileExistsError, match=rf"{finished.folder}/config\.json must be a file"):
            train(finished, resume=True)
        (finished.folder / CONFIG).rmdir()
    with skipped if place == "newest" else nullcontext():
        assert same_end(train(finished, resume=True), whole)
    assert (finished.folder / CONFIG).read_bytes() == (whole.run.folder / CONFIG).read_bytes()


def test_a_config_of_another_model_is_refused(finished: Run) -> None:
    for changes in ({"model_dim": 64}, {"sinks": 2}, {"model_type": "llama", "num_layers": 3}):
        own = (finished.folder / CONFIG).read_text()
        rewrite(finished.folder, lambda fields, changes=changes: fields.update(changes))  # type: ignore[misc]
        for use in (lambda: gecko.load(finished.folder), lambda: train(finished, resume=True)):
            with pytest.raises(ValueError, match="must hold one model; it is a training run"):
                use()
        (finished.folder / CONFIG).write_text(own)


# ---- A run goes on when nothing can be printed any more, and loses no numbers when its files are moved or deleted.


class Lost(io.StringIO):
    """Stream that takes some writes, then none."""

    def __init__(self, error: Exception, writes: int) -> None:
        super().__init__()
        self.error, self.left = error, writes

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    ("error", "names", "writes"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), ["stdout"], 3),
        (OSError(errno.ENOSPC, "No space left"), ["stderr", "stdout"], 0),
        (ValueError("closed"), ["stdout"], 3),
    ],
    ids=["pipe", "disk", "closed"],
)
def test_a_run_ends_as_without_output_that_cannot_be_written(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, error: Exception, names: list[str], writes: int
) -> None:
    streams = [Lost(error, writes) for _ in names]
    for name, stream in zip(names, streams, strict=True):
        monkeypatch.setattr(sys, name, stream)
    result = train(run_in("lost"))
    assert result.finished and (result.run.folder / "results.json").is_file()
    assert [getattr(sys, name) for name in names] == streams


@pytest.mark.parametrize(("step", "how"), [(3, "deleted"), (5, "replaced"), (12, "deleted")])
def test_metrics_that_are_deleted_or_replaced_keep_all_steps(
    small_run: Run, whole: TrainResult, monkeypatch: pytest.MonkeyPatch, step: int, how: str
) -> None:
    path = small_run.folder / "metrics.jsonl"

    def replaced() -> None:
        shutil.copy(path, path.with_name("copy"))
        path.with_name("copy").rename(path)

    stop_after(step, monkeypatch, path.unlink if how == "deleted" else replaced)
    with pytest.warns(UserWarning, match="deleted while the run trains") if how == "deleted" else monkeypatch.context():
        result = train(small_run)
    assert curve(small_run) == curve(whole.run) and same_end(result, whole)


@pytest.mark.parametrize(("step", "how"), [(1, "moved"), (3, "deleted"), (5, "replaced"), (12, "moved")])
def test_a_run_whose_folder_is_moved_ends_and_begins_no_second_one(
    run_in: Callable[[str], Run], whole: TrainResult, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int,
    how: str,
) -> None:  # fmt: skip
    run = run_in("moved")

    def moved() -> None:
        run.folder.rename(tmp_path / "elsewhere")
        if how == "deleted":
            shutil.rmtree(tmp_path / "elsewhere")
        if how == "replaced":
            run.folder.mkdir()

    stop_after(step, monkeypatch, moved)
    with pytest.raises(OSError, match=r"moved was moved or deleted\. .* continue with --resume"):
        train(run)
    assert not run.folder.exists() or not any(run.folder.iterdir())
    if how == "moved":
        monkeypatch.undo()
        (tmp_path / "elsewhere").rename(run.folder)
        assert same_end(train(run, resume=True), whole)


def test_a_folder_that_is_moved_during_the_last_evaluation_gets_no_results(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gecko.train.finish.evaluate", lambda *_: small_run.folder.rename(tmp_path / "elsewhere"))
    with pytest.raises(OSError, match=r"run was moved or deleted during"):
        train(small_run)
    assert not small_run.folder.exists()
