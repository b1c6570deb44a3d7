"""A dry run measures memory, to the byte also of deep models, and checks communication as they are in training."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gecko
from gecko.models import LlamaConfig, ModelConfig
from gecko.models.gecko import Block
from gecko.ops.backends.dispatch import CustomOp
from gecko.ops.chunk_attention import Pattern, chunk_attention
from gecko.parallel.mesh import MeshSizes
from gecko.plan import GPUS, Assumptions, Plan, make_plan
from gecko.plan.device import DEVICE, FakeGPU, MemoryLedger, Trace, check_traces
from gecko.plan.dry_run import dry_step, graph_count, representatives, step_peak, verify
from gecko.recipes import get_recipe
from gecko.train import ParallelSettings, Run

pytest.importorskip("triton")

GECKO = gecko.GeckoConfig(
    vocab_size=512, num_layers=5, model_dim=128, key_dim=64, value_dim=128, num_heads=2, ffn_dim=256, chunk_size=128,
    timestep_groups=4,
)  # fmt: skip
SMALL = replace(GECKO, num_layers=2)
LLAMA = LlamaConfig(vocab_size=512, num_layers=5, model_dim=128, num_heads=4, ffn_dim=256)
ALONE, TWO, SHARED, FOUR = MeshSizes(), MeshSizes(1, 2, 1), MeshSizes(2, 2, 2), MeshSizes(1, 2, 4)
MUON = replace(get_recipe("tiny").optimizer, name="muon")
CARRIED = replace(get_recipe("tiny").data, carry_state=True)


def run_of(model: ModelConfig, sizes: MeshSizes, **changes: Any) -> Run:
    parallel = ParallelSettings(sizes.replicate, sizes.shard, sizes.context)
    settings: dict[str, Any] = {"batch_size": 4, "sequence_length": 1024, "precision": "bfloat16", **changes}
    return replace(get_recipe("tiny"), model=model, parallel=parallel, **settings)


def plan_of(model: ModelConfig, sizes: MeshSizes, **changes: Any) -> Plan:
    gpus = sizes.replicate * sizes.shard * sizes.context
    return make_plan(run_of(model, sizes, **changes), gpus, GPUS["h100"], Assumptions())


LONG = run_of(SMALL, SHARED, sequence_length=8192)
"""A run whose memory is mostly activations, as that of large models."""


@pytest.fixture(scope="module")
def steps() -> dict[int, tuple[MemoryLedger, Trace]]:
    return {rank: dry_step(LONG, SHARED, rank) for rank in representatives(SHARED)}


@pytest.fixture
def traces(steps: dict[int, tuple[MemoryLedger, Trace]]) -> dict[int, Trace]:
    """Return copies of the traces."""
    return {rank: copy.deepcopy(trace) for rank, (_, trace) in steps.items()}


def test_ranks_of_a_mesh_fit_together(traces: dict[int, Trace]) -> None:
    agreement = check_traces(traces)
    # The world, two groups that share parameters, two pairs of copies and three context groups.
    assert agreement.groups == 1 + 2 + 2 + 3
    layers, exchanges = 2, 4
    assert agreement.messages >= 3 * layers * exchanges * 2, "each way, in each of three context groups"


def test_a_missing_collective_is_found(traces: dict[int, Trace]) -> None:
    calls = traces[7].calls
    calls.remove(next(call for call in calls if call.operation == "_allgather_base_"))
    with pytest.raises(ValueError, match="must start the same collectives in the same order"):
        check_traces(traces)


@pytest.mark.parametrize("operation", ["send", "recv_"])
def test_a_missing_end_of_a_message_is_found(traces: dict[int, Trace], operation: str) -> None:
    calls = traces[2].calls
    del calls[max(i for i, call in enumerate(calls) if call.operation == operation)]
    with pytest.raises(ValueError, match="each send must have a receive"):
        check_traces(traces)


def test_a_rank_that_skips_a_collective_in_its_code_is_found(
    traces: dict[int, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gecko.parallel.context.ContextGroup.mean", lambda self, local, count: local)
    with pytest.raises(ValueError, match="Training would hang"):
        check_traces({0: traces[0], 1: dry_step(LONG, SHARED, 1)[1]})


def test_memory_of_one_more_saved_tensor_with_operators_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(SMALL, ALONE, batch_size=2, precision="float32")
    seen, call = set(), CustomOp.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CustomOp, "__call__", lambda op, *given: seen.add(op.registered._name) or call(op, *given))
        before = dry_step(run, ALONE, 0)[0].peak()
    assert {"cema", "timestep_norm", "attend_grid", "memory_read", "swiglu", "cross_entropy"} <= seen
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda block, x, *rest: forward(block, x * x.detach().clone(), *rest))
    layers, saved = 2, 4 * 2 * run.sequence_length * run.model.model_dim
    after = dry_step(run, ALONE, 0)[0].peak()
    assert after.uses["activations kept"] - before.uses["activations kept"] == pytest.approx(layers * saved, rel=0.1)


def test_memory_of_a_layer_is_exact() -> None:
    """Weights, an input that is freed by a resize, two outputs, of which one is freed, and a buffer."""
    ledger = MemoryLedger()
    with FakeGPU(ledger.see).running(), ledger.recording():
        layer = nn.Linear(256, 256, bias=False, device=DEVICE)
        x = torch.empty(64, 256, device=DEVICE)
        y: Tensor = layer(x).exp()
        x.untyped_storage().resize_(0)
        buffer = torch.empty(3 * 64, 256, device=DEVICE)
    assert ledger.peak().total == 4 * (256 * 256 + 64 * 256 + 3 * 64 * 256)
    assert len(y) + len(buffer) == 4 * 64


def test_memory_inside_an_operator_is_counted() -> None:
    """Attention writes the weights of its windows, and frees them before it returns."""
    ledger, chunk, chunks = MemoryLedger(), 2048, 4
    with FakeGPU(ledger.see).running():
        q, k, v = (torch.empty(1, 1, chunks * chunk, n, dtype=torch.bfloat16, device=DEVICE) for n in (256, 256, 2048))
        out, _ = chunk_attention(q, k, v, Pattern(chunk))
    assert out.shape == v.shape
    assert ledger.peak().total - ledger.in_use >= v.itemsize * (2 * chunks - 1) * chunk**2


@pytest.mark.parametrize("sizes", [ALONE, TWO])
def test_gradients_that_a_graph_adds_into_exist_all_along(sizes: MeshSizes) -> None:
    """With several ranks each also has all weights, beside its shard."""
    run = run_of(SMALL, sizes)
    plain, captured = (dry_step(replace(run, capture=capture), sizes, 0)[0].peak() for capture in (False, True))
    size = sum(x.numel() for x in gecko.Gecko(SMALL).parameters()) * 4
    assert captured.uses["gradients"] == pytest.approx(size, rel=1e-2) != plain.uses.get("gradients", 0)
    more = captured.uses["parameters"] - plain.uses["parameters"]
    assert more == (0 if sizes is ALONE else pytest.approx(size, rel=1e-2))


def test_the_plan_is_verified(steps: dict[int, tuple[MemoryLedger, Trace]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.plan.dry_run.dry_step", lambda run, sizes, rank: steps[rank])
    plan = make_plan(LONG, 8, GPUS["h100"], Assumptions())
    dry_run = verify(plan.run, plan.sizes, plan.memory)
    assert dry_run.passed and abs(dry_run.difference) < 0.01
    assert dry_run.ranks == (0, 1, 2, 3, 6, 7) == representatives(SHARED)
    assert dry_run.graphs == {}


def test_representatives_are_the_corners_of_the_mesh() -> None:
    assert representatives(MeshSizes(32, 4, 2)) == (0, 1, 6, 7, 254, 255)
    assert representatives(ALONE) == (0,)


def test_graphs_do_not_depend_on_the_depth() -> None:
    run = get_recipe("gecko_7b")
    assert graph_count(run, 2) == graph_count(run, 3) > 0


@pytest.mark.parametrize(
    ("model", "sizes", "changes"),
    [
        (GECKO, ALONE, {"precision": "float32", "activation_checkpointing": "selective", "optimizer": MUON}),
        (GECKO, ALONE, {"data": CARRIED, "activation_checkpointing": "full", "gradient_accumulation_steps": 2}),
        (GECKO, SHARED, {"gradient_accumulation_steps": 3, "batch_size": 12}),
        (GECKO, FOUR, {"activation_checkpointing": "full"}),
        (replace(GECKO, memory="none", attention="chunk", vocab_size=32_000), FOUR, {}),
        (GECKO, MeshSizes(2, 2, 1), {"capture": True, "gradient_accumulation_steps": 2, "batch_size": 8}),
        (LLAMA, ALONE, {}),
        (LLAMA, TWO, {"activation_checkpointing": "full", "gradient_accumulation_steps": 2}),
    ],
)
def test_the_peak_of_a_deep_model_is_exact(model: ModelConfig, sizes: MeshSizes, changes: dict[str, Any]) -> None:
    run, rank = run_of(model, sizes, **changes), sizes.context - 1
    whole, extended = dry_step(run, sizes, rank)[0].peak(), step_peak(run, sizes, rank)
    assert extended.total == whole.total
    assert {use: size for use, size in extended.uses.items() if size} == whole.uses


def test_rows_are_nearly_alike() -> None:
    run = run_of(SMALL, ALONE, batch_size=10)
    assert step_peak(run, ALONE, 0).total == pytest.approx(dry_step(run, ALONE, 0)[0].peak().total, rel=1e-3)


def test_less_is_kept_where_more_is_recomputed() -> None:
    plans = [plan_of(SMALL, ALONE, activation_checkpointing=mode) for mode in ("none", "selective", "full")]
    kept, work = [plan.memory["activations kept"] for plan in plans], [plan.recomputed for plan in plans]
    assert kept == sorted(kept, reverse=True) and work == sorted(work)


def test_carried_states_are_counted() -> None:
    """A GPU holds the states of all its rows before the step, and at the peak those after the first of two parts."""
    plan = plan_of(SMALL, ALONE, data=CARRIED, gradient_accumulation_steps=2)
    state = gecko.GeckoState.empty(SMALL, 4, device="meta")
    assert plan.memory["carried states"] == pytest.approx(1.5 * state.num_bytes, rel=0.05)


def test_accumulation_holds_a_shard_of_the_gradients() -> None:
    """From part to part, a GPU keeps its shard of the gradients and nothing else."""
    one, two, four = (plan_of(SMALL, TWO, gradient_accumulation_steps=parts, batch_size=8) for parts in (1, 2, 4))
    assert two.memory["gradients"] == four.memory["gradients"] > one.memory["gradients"]
    assert two.memory["activations kept"] > 1.9 * four.memory["activations kept"]
