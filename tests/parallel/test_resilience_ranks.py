"""Ranks that fail, hang or are killed."""

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import training_jobs as work
from support.jobs import Answer, Jobs
from support.whole_runs import saved_steps, steps_in

from gecko.io.checkpoints import list_checkpoints
from gecko.io.files import locked
from gecko.train import CheckpointSettings, EvaluationSettings, Run, SkipSettings

# ---- If a rank is poisoned, hung or killed, all ranks do the same, and no training is lost.

LAYER = "blocks.1.feed_forward.fc2"


def test_a_nan_on_one_rank_is_named_and_skipped_by_all(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """Too many in a row end all ranks, and one says so."""
    run = run_in("x", max_skips=3)
    first, second = jobs.answers(2, work.poisoned_run, run, LAYER, 1, {3, 4, 6, 7, 8}, float("nan"))
    skipped = {record["step"]: record["skipped"] for record in steps_in(run.folder) if "skipped" in record}
    assert list(skipped) == [3, 4, 6, 7, 8]
    assert skipped[3] == "the output of blocks.1.feed_forward.fc2 (Linear) is not finite, on rank 1"
    assert [record["skips"] for record in steps_in(run.folder)] == [0, 0, 1, 2, 2, 3, 4, 5]
    assert first.error is not None and first.error.startswith("NonFiniteError: steps 6 to 8 ")
    assert second.error == "SystemExit: 2"


def test_a_spike_on_one_rank_is_skipped_by_all(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """If only one rank skipped the step, the parameters and all later losses would differ between ranks."""
    run = run_in("x", steps=14, skip=SkipSettings(deviations=6, window=12))
    jobs.run(2, work.poisoned_run, run, "final_norm", 1, {12}, 300.0)
    skipped = {record["step"]: record["skipped"] for record in steps_in(run.folder) if "skipped" in record}
    assert list(skipped) == [12]
    assert "standard deviations" in str(skipped[12])


_FAULTY = """
import os, signal, sys, time
from pathlib import Path
from gecko.train import Run, finish, train
from gecko.train.trainer import Trainer

finish.write_report = lambda run, *_: run.folder / finish.REPORT  # drawing its pictures takes seconds
folder, run = Path(sys.argv[1]), Run.load(sys.argv[1] + "/run.json")
rank, original = int(os.environ["RANK"]), Trainer._step

def once(name):
    if (folder / name).exists():
        return False
    (folder / name).touch()
    return True

def stand_still():
    time.sleep(1000)

def stepping(self):
    if rank == 1 and self.next_step == 7 and once("hung"):
        stand_still()
    if rank == 0 and self.next_step == 11 and once("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    original(self)

Trainer._step = stepping
train(run, resume=True)
"""


def torchrun(*command: str) -> tuple[int, str, str]:
    """Return exit code and output of two ranks, and check that no process is left."""
    options = ["--nproc-per-node=2", "--max-restarts=5", "--monitor-interval=0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        said, errors = process.communicate(timeout=480)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said, errors


def test_hung_and_killed_ranks_come_back_by_themselves(jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path) -> None:
    """Under torchrun a rank hangs until the watchdog ends all, and later one is killed; the run is the same."""
    changes = {"evaluation": EvaluationSettings(every=50, rows=2, final_rows=2), "steps": 14}
    whole, faulty = (run_in(name, **changes) for name in ("whole", "faulty"))
    jobs.run(2, work.train_run, whole)
    faulty = replace(faulty, hang_minutes=0.15, checkpoint=CheckpointSettings(every=3))
    faulty.save(tmp_path / "run.json")
    (tmp_path / "faulty.py").write_text(_FAULTY)
    code, said, errors = torchrun(str(tmp_path / "faulty.py"), str(tmp_path))
    assert code == 0, errors[-3000:]
    assert (tmp_path / "hung").exists() and (tmp_path / "killed").exists()
    stacks = {path.name: path.read_text() for path in (faulty.folder / "stacks").glob("*.txt")}
    assert "stand_still" in stacks["rank-00001.txt"]
    assert "Timeout" in stacks["rank-00000.txt"] and "in _start" in stacks["rank-00000.txt"]
    for rank in range(2):
        recorded = pickle.loads((faulty.folder / "stacks" / f"flight-{rank}").read_bytes())["entries"]
        assert any(entry["profiling_name"].startswith("gloo:") for entry in recorded)
    assert "an earlier session hung" in said
    assert said.count("continuing after step") >= 2
    losses = [np.array([record["loss"] for record in steps_in(run.folder)]) for run in (whole, faulty)]
    assert np.array_equal(*losses)


# ---- A failure on one rank ends all ranks at once: the first prints the reason, the others exit with code 2.


def refused(answers: list[Answer]) -> str:
    """Return the first rank's error, after a check that the second rank exits with code 2."""
    first, second = answers
    assert first.error is not None and second.error == "SystemExit: 2", (first.trace, second.trace)
    return first.error


def test_a_checkpoint_that_one_rank_cannot_read(jobs: Jobs, trained: Run) -> None:
    """Both ranks skip it and use the one before."""
    first, second = jobs.run(2, work.run_with_an_unreadable_checkpoint, trained, 1, "step-00000008")
    assert (first["step"], second["step"]) == (8, 8)
    assert any("skipping the checkpoint step-00000008: " in warning for warning in first["warnings"])


def test_steps_that_fail_on_all_ranks_while_a_checkpoint_is_written(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """The checkpoint is completed."""
    run = run_in("x", max_skips=2)
    poison = "blocks.1.feed_forward.fc2", 1, range(6, 20), float("nan")
    said = refused(jobs.answers(2, work.poisoned_run_on_a_slow_disk, run, *poison))
    assert said.startswith("NonFiniteError: steps 6 to 7 ")
    assert saved_steps(run) == [4]


def test_a_step_that_fails_on_one_rank_while_a_checkpoint_is_written(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """The checkpoint is completed. Then the failed rank exits, and the other one reports the closed connection."""
    run = run_in("x")
    first, second = jobs.answers(2, work.failing_run_on_a_slow_disk, run, 1, 6)
    assert first.error is not None and "losed by peer" in first.error
    assert second.error == "rank 1 ended with exit code 3"
    assert saved_steps(run) == [4]


def test_a_folder_in_which_another_trains(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    run = run_in("x", steps=4)
    with locked(run.folder / ".training", wait=False):
        assert "ValueError: one process at a time" in refused(jobs.answers(2, work.train_run, run))


def test_numbers_that_are_damaged(jobs: Jobs, trained: Run) -> None:
    (trained.folder / "metrics.jsonl").write_text("{broken\n{}\n")
    first, second = jobs.run(2, work.train_run, trained, True)
    assert (first["step"], second["step"]) == (8, 8)
    for line in (1, 2):
        assert any(f"metrics.jsonl, line {line}, must be" in warning for warning in first["warnings"])


@pytest.mark.parametrize(
    ("rank", "method", "name", "said"),
    [
        (0, "glob", "checkpoints", r"OSError: \[Errno 116\].*checkpoints"),
        (1, "is_dir", "texts", "RuntimeError: on rank 1: "),
    ],
)
def test_a_folder_that_one_rank_cannot_look_into(
    jobs: Jobs, run_in: Callable[..., Run], rank: int, method: str, name: str, said: str
) -> None:
    answers = jobs.answers(2, work.run_with_a_lost_folder, run_in("x", steps=4), rank, method, name)
    assert re.match(said, refused(answers))


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
