"""What fails on one rank ends all of them, at once: the first says why, the others exit with code 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import training_jobs as work
from jobs import Answer, Jobs

from gecko.lock import locked
from gecko.train import Run
from gecko.train.snapshot import checkpoints_folder


@pytest.fixture
def impatient(run_in: Callable[..., Run]) -> Callable[..., Run]:
    """Ranks that wait for each other in two places give up after a minute."""

    def make(name: str, **changes: Any) -> Run:
        return run_in(name, hang_minutes=0.5, **changes)

    return make


def refused(answers: list[Answer]) -> str:
    """What the first rank says, where the second one leaves it to it."""
    first, second = answers
    assert first.error is not None and second.error == "SystemExit: 2", (first.trace, second.trace)
    return first.error


def test_a_checkpoint_that_cannot_be_begun(jobs: Jobs, impatient: Callable[..., Run]) -> None:
    run = impatient("x")
    run.folder.mkdir()
    checkpoints_folder(run).write_text("not a folder")
    said = refused(jobs.answers(2, work.train_run, run))
    assert said.startswith("OSError: the checkpoint of step 4 could not be written") and "File exists" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_rank_cannot_read(jobs: Jobs, impatient: Callable[..., Run], rank: int) -> None:
    """It is passed over by both for the one before."""
    run = impatient("x", steps=8)
    jobs.run(2, work.train_run, run)
    first, second = jobs.run(2, work.run_with_an_unreadable_checkpoint, run, rank, "step-00000008")
    assert (first["step"], second["step"]) == (8, 8)
    assert any("skipping the checkpoint step-00000008: " in warning for warning in first["warnings"])


def test_a_folder_in_which_another_trains(jobs: Jobs, impatient: Callable[..., Run]) -> None:
    run = impatient("x")
    with locked(run.folder / ".training", wait=False):
        assert "ValueError: one process at a time" in refused(jobs.answers(2, work.train_run, run))
    assert jobs.run(2, work.train_run, run)[0]["step"] == 20


def test_numbers_that_are_damaged(jobs: Jobs, impatient: Callable[..., Run]) -> None:
    run = impatient("x", steps=4)
    jobs.run(2, work.train_run, run)
    (run.folder / "metrics.jsonl").write_text("{broken\n{}\n")
    assert "metrics.jsonl, line 1, must be" in refused(jobs.answers(2, work.train_run, run, True))
