"""Ranks do not wait for the host or for other hosts between a batch and the optimizer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support import step_trace as work
from support.jobs import Jobs
from support.training_jobs import bytes_in_cycles

from gecko.train import EvaluationSettings, Run


@pytest.mark.parametrize(
    ("mesh", "carried"),
    [({}, False), ({"context": 2}, True), ({"replicate": 2}, False)],
    ids=["shard-2", "context-2-carried", "replicate-2"],
)
def test_a_step_has_no_read_and_no_collective_of_the_host(
    jobs: Jobs, run_in: Callable[..., Run], mesh: dict[str, int], carried: bool
) -> None:
    """Around it is one collective, which the ranks look at a step later."""
    run = run_in("x", gradient_accumulation_steps=2, steps=3, evaluation=EvaluationSettings(100, 2, 2), **mesh)
    run = replace(run, data=replace(run.data, carry_state=carried))
    for found in jobs.run(2, work.traced_run, run):
        assert found["steps"] == 3
        assert found["reads"] == [] and found["control"] == []
        assert found["around"] == [["c10d::allreduce_"]] * 4
        assert found["others"]  # those of the devices


@pytest.mark.parametrize(
    ("ranks", "mesh", "checkpointing"),
    [(1, {}, "full"), (2, {}, "selective"), (2, {"context": 2}, "none")],
    ids=["one-recomputed", "shard-2", "context-2"],
)
def test_steps_leave_no_tensors_in_reference_cycles(
    jobs: Jobs, run_in: Callable[..., Run], ranks: int, mesh: dict[str, int], checkpointing: Any
) -> None:
    """Otherwise activations would stay in memory until the next collection, 50 steps later."""
    run = run_in("x", activation_checkpointing=checkpointing, gradient_accumulation_steps=2, **mesh)
    assert jobs.run(ranks, bytes_in_cycles, run) == [0] * ranks
