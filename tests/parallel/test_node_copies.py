"""A job that lost nodes continues from the memory of the others, without the last steps being computed again."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from parallel.conftest import Kept
from support import training_jobs as work
from support.jobs import Answer, Jobs
from support.whole_runs import losses

from gecko.io.checkpoints import checkpoint_step, list_checkpoints
from gecko.train import CheckpointSettings, DataSettings, Run

RANKS = 4
FAILED = 10
"""Step before which all ranks fail; the last checkpoint is that of step 6."""


@pytest.fixture(scope="module")
def failed(jobs: Jobs, run_at: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("nodes")
    run = run_at(folder / "lost", replicate=2, checkpoint=CheckpointSettings(every=6, memory_every=1), steps=14)
    for answer in jobs.answers(RANKS, work.run_on_nodes, run, nodes_in(folder), FAILED):
        assert answer.error is not None and "a node is lost" in answer.error
    assert all(len(list(node.rglob("*.safetensors"))) == 2 for node in nodes_in(folder))
    return Kept(run)


def nodes_in(folder: Path) -> list[Path]:
    return [folder / f"node-{rank}" for rank in range(RANKS)]


@pytest.fixture
def lost(failed: Kept) -> tuple[Run, list[Path]]:
    """Return a run of two replicas of two shards that failed in step 10, and the memory of its four nodes."""
    run = failed.restored()
    return run, nodes_in(run.folder.parent)


@pytest.fixture(scope="module")
def whole(jobs: Jobs, run_at: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Return the losses of the same run, undisturbed and without copies."""
    run = run_at(tmp_path_factory.mktemp("whole") / "run", replicate=2, steps=14)
    jobs.run(RANKS, work.train_run, run)
    return losses(run)


@pytest.mark.parametrize(
    ("gone", "order", "step"),
    [
        ((0, 3), (0, 1, 2, 3), 9),
        ((2,), (3, 2, 0, 1), 9),  # torchrun gives the nodes other ranks
        ((1, 3), (0, 1, 2, 3), 6),  # no rank has the second shard, so all return to the checkpoint
    ],
)
def test_ranks_of_a_lost_node_take_their_shards_from_another_replica(
    jobs: Jobs, lost: tuple[Run, list[Path]], whole: np.ndarray, gone: tuple[int, ...],
    order: tuple[int, ...], step: int,
) -> None:  # fmt: skip
    run, nodes = lost
    for node in gone:
        shutil.rmtree(nodes[node])
    first = went_on(jobs, run, [nodes[node] for node in order], f"continuing after step {step}, from ")
    assert ("the memory of the nodes" in first.output) == (step == FAILED - 1)
    assert np.array_equal(losses(run), whole)
    assert not any(list(node.rglob("*.safetensors")) for node in nodes)


def went_on(jobs: Jobs, run: Run, nodes: list[Path], said: str, ranks: int = RANKS) -> Answer:
    """Resume the run and return the first rank's answer, which says so."""
    first, *_ = jobs.answers(ranks, work.run_on_nodes, run, nodes, None, True)
    assert first.error is None, first.trace
    assert said in first.output
    return first


def test_a_step_without_numbers_is_not_taken(jobs: Jobs, lost: tuple[Run, list[Path]], whole: np.ndarray) -> None:
    """The first rank's node was lost before it wrote them, so that the curve would have a hole."""
    run, nodes = lost
    path = run.folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    went_on(jobs, run, nodes, "continuing after step 8, from the memory")
    assert np.array_equal(losses(run), whole)


def test_a_recovered_state_is_on_disk_at_once(jobs: Jobs, lost: tuple[Run, list[Path]]) -> None:
    """Else it would be lost with the next node. The job fails again in the same step, and all memory is lost."""
    run, nodes = lost
    answers = jobs.answers(RANKS, work.run_on_nodes, run, nodes, FAILED, True)
    assert all(answer.error is not None and "a node is lost" in answer.error for answer in answers)
    assert checkpoint_step(list_checkpoints(run.checkpoints_folder)[0]) == FAILED - 1
    # A run that begins anew takes no copies.
    shutil.rmtree(run.folder)
    first, *_ = jobs.answers(RANKS, work.run_on_nodes, replace(run, steps=2), nodes, None, True)
    assert first.error is None and "continuing" not in first.output


def test_copies_of_another_division_are_not_read(jobs: Jobs, lost: tuple[Run, list[Path]], whole: np.ndarray) -> None:
    """Two ranks have other shards than four."""
    run, nodes = lost
    two = replace(run, parallel=replace(run.parallel, replicate=1))
    went_on(jobs, two, nodes, "continuing after step 6", ranks=2)
    np.testing.assert_allclose(losses(run), whole, rtol=1e-5)


def test_weights_that_diverged_are_not_kept(jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path) -> None:
    """All steps after 7 are skipped, until the run gives up; it must not continue from their weights."""
    run = run_in("x", checkpoint=CheckpointSettings(6, memory_every=1, memory_folder=str(tmp_path / "m")), max_skips=2)
    layer = "blocks.1.feed_forward.fc2"
    first, _ = jobs.answers(2, work.poisoned_run, run, layer, 1, range(8, 20), float("inf"))
    assert first.error is not None and first.error.startswith("NonFiniteError")
    assert not list((tmp_path / "m").rglob("*.safetensors"))


def test_memory_that_is_full_ends_the_copies_and_not_the_run(
    jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    run = run_in("x", checkpoint=CheckpointSettings(memory_every=1, memory_folder=str(tmp_path / "file")))
    assert [result["step"] for result in jobs.run(2, work.train_run, replace(run, steps=3))] == [3, 3]


def test_carried_states_are_refused(run_in: Callable[..., Run]) -> None:
    """Data ranks have different lanes, and no replica holds the lanes of another rank."""
    run = run_in("x")
    data = DataSettings(source=run.data.source, carry_state=True)
    with pytest.raises(ValueError, match=r"checkpoint\.memory_every.*data\.carry_state=true.*memory_every=none"):
        replace(run, data=data, checkpoint=CheckpointSettings(memory_every=1))
