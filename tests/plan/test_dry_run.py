"""A dry run measures memory and checks communication as they are in training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gecko.models.gecko import Block
from gecko.parallel.mesh import MeshSizes
from gecko.plan import GPUS, Assumptions, make_plan
from gecko.plan.device import DEVICE, FakeGPU, MemoryLedger, Trace, check_traces
from gecko.plan.dry_run import dry_step
from gecko.plan.verify import graph_count, representatives, verify
from gecko.recipes import get_recipe
from gecko.train import ParallelSettings, Run

pytest.importorskip("triton")

SIZES = MeshSizes(2, 2, 2)


def small_run(**changes: Any) -> Run:
    run = get_recipe("tiny")
    parallel = ParallelSettings(replicate=2, shard=2, context=2)
    return replace(run, model=replace(run.model, num_layers=2), parallel=parallel, **changes)


def long_run() -> Run:
    """Return a run whose memory is mostly activations, as that of large models."""
    return small_run(sequence_length=8192)


@pytest.fixture(scope="module")
def steps() -> dict[int, tuple[MemoryLedger, Trace]]:
    return {rank: dry_step(long_run(), SIZES, rank) for rank in representatives(SIZES)}


def traces_of(steps: dict[int, tuple[MemoryLedger, Trace]]) -> dict[int, Trace]:
    """Return copies of the traces."""
    traces = {rank: Trace() for rank in steps}
    for rank, step in steps.items():
        traces[rank].calls = list(step[1].calls)
    return traces


def test_ranks_of_a_mesh_fit_together(steps: dict[int, tuple[MemoryLedger, Trace]]) -> None:
    agreement = check_traces(traces_of(steps))
    # The world, two groups that share parameters, two pairs of copies and three context groups.
    assert agreement.groups == 1 + 2 + 2 + 3
    layers, exchanges = 2, 4
    assert agreement.messages >= 3 * layers * exchanges * 2, "each way, in each of three context groups"


def test_a_missing_collective_is_found(steps: dict[int, tuple[MemoryLedger, Trace]]) -> None:
    traces = traces_of(steps)
    calls = traces[7].calls
    calls.remove(next(call for call in calls if call.operation == "_allgather_base_"))
    with pytest.raises(ValueError, match="must start the same collectives in the same order"):
        check_traces(traces)


@pytest.mark.parametrize("operation", ["send", "recv_"])
def test_a_missing_end_of_a_message_is_found(steps: dict[int, tuple[MemoryLedger, Trace]], operation: str) -> None:
    traces = traces_of(steps)
    calls = traces[2].calls
    del calls[max(i for i, call in enumerate(calls) if call.operation == operation)]
    with pytest.raises(ValueError, match="each send must have a receive"):
        check_traces(traces)


def test_a_rank_that_skips_a_collective_in_its_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = dry_step(small_run(), SIZES, 0)
    monkeypatch.setattr("gecko.parallel.context.ContextGroup.mean", lambda self, local, count: local)
    with pytest.raises(ValueError, match="Training would hang"):
        check_traces({0: first, 1: dry_step(small_run(), SIZES, 1)[1]})


def test_memory_of_one_more_saved_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run()
    run = replace(run, parallel=ParallelSettings(), batch_size=2)
    before = dry_step(run, MeshSizes(), 0)[0].peak()
    forward = Block.forward

    def more(block: Block, x: Tensor, *rest: Any) -> Any:
        return forward(block, x * x.detach().clone(), *rest)

    monkeypatch.setattr(Block, "forward", more)
    layers, saved = 2, 4 * 2 * run.sequence_length * run.model.model_dim
    after = dry_step(run, MeshSizes(), 0)[0].peak()
    assert after.uses["activations kept"] - before.uses["activations kept"] == pytest.approx(layers * saved, rel=0.1)


def test_memory_of_a_layer_is_exact() -> None:
    """Weights, an input that is freed by a resize, two outputs, of which one is freed, and a buffer."""
    ledger = MemoryLedger()
    with FakeGPU(ledger.see).running(), ledger.recording():
        layer = nn.Linear(256, 256, bias=False, device=DEVICE)
        x = torch.empty(64, 256, device=DEVICE)
        y = layer(x).exp()
        x.untyped_storage().resize_(0)
        buffer = torch.empty(3 * 64, 256, device=DEVICE)
    assert ledger.peak().total == 4 * (256 * 256 + 64 * 256 + 3 * 64 * 256)
    assert len(y) + len(buffer) == 4 * 64


def test_operators_are_those_of_a_gpu() -> None:
    seen = set()
    run = replace(small_run(), parallel=ParallelSettings(), batch_size=1)
    with pytest.MonkeyPatch.context() as patch:
        named = partial(FakeGPU, lambda operation, *_: seen.add(str(operation)))
        patch.setattr("gecko.plan.dry_run.FakeGPU", named)
        dry_step(run, MeshSizes(), 0)
    names = ("cema", "timestep_norm", "attend_grid", "memory_chain", "swiglu", "cross_entropy")
    assert {f"gecko.{name}.default" for name in names} <= seen


def test_the_plan_is_verified(steps: dict[int, tuple[MemoryLedger, Trace]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.plan.verify.dry_step", lambda run, sizes, rank: steps[rank])
    dry_run = verify(make_plan(long_run(), 8, GPUS["h100"], Assumptions()))
    assert dry_run.passed and abs(dry_run.difference) < 0.01
    assert dry_run.ranks == (0, 1, 2, 3, 6, 7) == representatives(SIZES)
    assert dry_run.graphs == {}


def test_representatives_are_the_corners_of_the_mesh() -> None:
    assert representatives(MeshSizes(32, 4, 2)) == (0, 1, 6, 7, 254, 255)
    assert representatives(MeshSizes()) == (0,)


def test_graphs_do_not_depend_on_the_depth() -> None:
    run = get_recipe("gecko_7b")
    assert graph_count(run, 2) == graph_count(run, 4) > 0
