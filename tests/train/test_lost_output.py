"""A run goes on when nothing can be printed any more, and loses no numbers when its files are moved or deleted."""

from __future__ import annotations

import errno
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import curve, same_end

from gecko.train import Run, TrainResult, train
from gecko.train.trainer import Trainer


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


ERRORS = [BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.ENOSPC, "No space left"), ValueError("closed")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("names", "writes"), [(["stdout"], 3), (["stderr", "stdout"], 0)])
def test_a_run_ends_as_without_output_that_cannot_be_written(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, error: Exception, names: list[str], writes: int
) -> None:
    streams = [Lost(error, writes) for _ in names]
    for name, stream in zip(names, streams, strict=True):
        monkeypatch.setattr(sys, name, stream)
    result = train(run_in("lost"))
    assert result.finished and (result.run.folder / "results.json").is_file()
    assert [getattr(sys, name) for name in names] == streams


def change(step: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do ``work`` before the given step of the next run is started."""
    start = Trainer._start

    def starting(self: Trainer, number: int) -> Any:
        if number == step:
            monkeypatch.setattr(Trainer, "_start", start)
            work()
        return start(self, number)

    monkeypatch.setattr(Trainer, "_start", starting)


@pytest.mark.parametrize("step", [3, 5, 12])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_metrics_that_are_deleted_or_replaced_keep_all_steps(
    small_run: Run, whole: TrainResult, monkeypatch: pytest.MonkeyPatch, step: int, how: str
) -> None:
    path = small_run.folder / "metrics.jsonl"

    def replaced() -> None:
        shutil.copy(path, path.with_name("copy"))
        path.with_name("copy").rename(path)

    change(step, monkeypatch, path.unlink if how == "deleted" else replaced)
    with pytest.warns(UserWarning, match="deleted while the run trains") if how == "deleted" else monkeypatch.context():
        result = train(small_run)
    assert curve(small_run) == curve(whole.run) and same_end(result, whole)


@pytest.mark.parametrize("step", [1, 3, 5, 12])
@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
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

    change(step, monkeypatch, moved)
    with pytest.raises(OSError, match=r"moved was moved or deleted\. .* continue with --resume"):
        train(run)
    assert not run.folder.exists() or not any(run.folder.iterdir())
    if how == "moved":
        monkeypatch.undo()
        (tmp_path / "elsewhere").rename(run.folder)
        assert same_end(train(run, resume=True), whole)


def test_a_folder_that_is_moved_during_the_last_evaluation_gets_no_results(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = run_in("moved")
    monkeypatch.setattr("gecko.train.finish._final_loss", lambda *_: run.folder.rename(tmp_path / "elsewhere"))
    with pytest.raises(OSError, match=r"moved was moved or deleted during"):
        train(run)
    assert not run.folder.exists()
