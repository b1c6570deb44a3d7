"""A failure on one rank ends all ranks at once: the first prints the reason, the others exit with code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import training_jobs as work
from support.jobs import Answer, Jobs

from gecko.io.checkpoints import list_checkpoints
from gecko.io.files import locked
from gecko.train import Run


def refused(answers: list[Answer]) -> str:
    """Return the first rank's error, after a check that the second rank exits with code 2."""
    first, second = answers
    assert first.error is not None and second.error == "SystemExit: 2", (first.trace, second.trace)
    return first.error


def test_a_checkpoint_that_cannot_be_begun(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    run = run_in("x")
    run.folder.mkdir()
    run.checkpoints_folder.write_text("not a folder")
    said = refused(jobs.answers(2, work.train_run, run))
    assert said.startswith("FileExistsError: ") and "checkpoints must be a folder" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_rank_cannot_read(jobs: Jobs, trained: Run, rank: int) -> None:
    """Both ranks skip it and use the one before."""
    first, second = jobs.run(2, work.run_with_an_unreadable_checkpoint, trained, rank, "step-00000008")
    assert (first["step"], second["step"]) == (8, 8)
    assert any("skipping the checkpoint step-00000008: " in warning for warning in first["warnings"])


def test_steps_that_fail_on_all_ranks_while_a_checkpoint_is_written(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """The checkpoint is completed."""
    run = run_in("x", max_skips=2)
    poison = "blocks.1.feed_forward.fc2", 1, range(6, 20), float("nan")
    said = refused(jobs.answers(2, work.poisoned_run_on_a_slow_disk, run, *poison))
    assert said.startswith("NonFiniteError: steps 6 to 7 ")
    assert [path.name for path in list_checkpoints(run.checkpoints_folder)] == ["step-00000004"]


def test_a_step_that_fails_on_one_rank_while_a_checkpoint_is_written(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """The checkpoint is completed. Then the failed rank exits, and the other one reports the closed connection."""
    run = run_in("x")
    first, second = jobs.answers(2, work.failing_run_on_a_slow_disk, run, 1, 6)
    assert first.error is not None and "losed by peer" in first.error
    assert second.error == "rank 1 ended with exit code 3"
    assert [path.name for path in list_checkpoints(run.checkpoints_folder)] == ["step-00000004"]


def test_a_folder_in_which_another_trains(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    run = run_in("x", steps=4)
    with locked(run.folder / ".training", wait=False):
        assert "ValueError: one process at a time" in refused(jobs.answers(2, work.train_run, run))
    assert jobs.run(2, work.train_run, run)[0]["step"] == 4


def test_numbers_that_are_damaged(jobs: Jobs, trained: Run) -> None:
    (trained.folder / "metrics.jsonl").write_text("{broken\n{}\n")
    first, second = jobs.run(2, work.train_run, trained, True)
    assert (first["step"], second["step"]) == (8, 8)
    for line in (1, 2):
        assert any(f"metrics.jsonl, line {line}, must be" in warning for warning in first["warnings"])


@pytest.mark.parametrize("method, name", [("glob", "checkpoints"), ("exists", "metrics.jsonl")])
def test_a_folder_that_the_first_rank_cannot_look_into(
    jobs: Jobs, run_in: Callable[..., Run], method: str, name: str
) -> None:
    said = refused(jobs.answers(2, work.run_with_a_lost_folder, run_in("x", steps=4), 0, method, name))
    assert said.startswith("OSError: [Errno 116]") and name in said


def test_a_text_that_one_rank_cannot_read(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    run = run_in("x", steps=4)
    answers = jobs.answers(2, work.run_with_a_lost_folder, run, 1, "is_dir", Path(run.data.source).name)
    assert "RuntimeError: on rank 1: " in refused(answers)


def test_a_recipe_is_read_by_the_first_rank_alone(jobs: Jobs, trained: Run) -> None:
    reading = trained, 1, "read_text", "recipe.json"
    assert [answer["step"] for answer in jobs.run(2, work.run_with_a_lost_folder, *reading)] == [8, 8]
    assert "recipe.json" in refused(jobs.answers(2, work.run_with_a_lost_folder, trained, 0, *reading[2:]))


def test_ranks_with_other_settings_do_not_resume_together(jobs: Jobs, trained: Run) -> None:
    said = refused(jobs.answers(2, work.resume_with_another_seed, trained, 1))
    assert said.startswith("RuntimeError: on rank 1: seed must be what the first rank has, 0; got 7.")


def test_checkpoints_that_are_all_damaged(jobs: Jobs, trained: Run) -> None:
    for checkpoint in list_checkpoints(trained.checkpoints_folder):
        (checkpoint / "manifest.json").unlink()
    assert "must hold an undamaged checkpoint" in refused(jobs.answers(2, work.train_run, trained, True))
