"""Memory of deep models from steps of few blocks is that of the whole model, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import gecko
from gecko.models import LlamaConfig, ModelConfig
from gecko.parallel.mesh import MeshSizes
from gecko.plan import GPUS, Assumptions, make_plan
from gecko.plan.dry_run import dry_step, step_peak
from gecko.recipes import get_recipe
from gecko.train import ParallelSettings, Run

pytest.importorskip("triton")

GECKO = gecko.GeckoConfig(
    vocab_size=512, num_layers=6, model_dim=128, key_dim=64, value_dim=128, num_heads=2, ffn_dim=256, chunk_size=128,
    timestep_groups=4,
)  # fmt: skip
LLAMA = LlamaConfig(vocab_size=512, num_layers=6, model_dim=128, num_heads=4, ffn_dim=256)
ALONE, SHARED, FOUR = MeshSizes(), MeshSizes(2, 2, 2), MeshSizes(1, 2, 4)
MUON = replace(get_recipe("tiny").optimizer, name="muon")
CARRIED = replace(get_recipe("tiny").data, carry_state=True)


def run_of(model: ModelConfig, sizes: MeshSizes, **changes: Any) -> Run:
    parallel = ParallelSettings(sizes.replicate, sizes.shard, sizes.context)
    settings: dict[str, Any] = {"batch_size": 4, "sequence_length": 1024, "precision": "bfloat16", **changes}
    return replace(get_recipe("tiny"), model=model, parallel=parallel, **settings)


@pytest.mark.parametrize(
    ("model", "sizes", "changes"),
    [
        (GECKO, ALONE, {}),
        (GECKO, ALONE, {"precision": "float32", "activation_checkpointing": "selective", "optimizer": MUON}),
        (GECKO, ALONE, {"data": CARRIED, "activation_checkpointing": "full", "gradient_accumulation_steps": 2}),
        (GECKO, SHARED, {"activation_checkpointing": "full"}),
        (GECKO, SHARED, {"gradient_accumulation_steps": 2, "batch_size": 8}),
        (GECKO, SHARED, {"gradient_accumulation_steps": 5, "batch_size": 20}),
        (GECKO, FOUR, {"activation_checkpointing": "selective"}),
        (GECKO, FOUR, {"activation_checkpointing": "full", "gradient_accumulation_steps": 4, "batch_size": 8}),
        (replace(GECKO, memory="none", attention="chunk", vocab_size=32_000), FOUR, {}),
        (LLAMA, ALONE, {}),
        (LLAMA, MeshSizes(1, 2, 1), {"activation_checkpointing": "full", "gradient_accumulation_steps": 2}),
    ],
)  # fmt: skip
def test_the_peak_of_a_deep_model_is_exact(model: ModelConfig, sizes: MeshSizes, changes: dict[str, Any]) -> None:
    run, rank = run_of(model, sizes, **changes), sizes.context - 1
    whole, extended = dry_step(run, sizes, rank)[0].peak(), step_peak(run, sizes, rank)
    assert extended.total == whole.total
    assert {use: size for use, size in extended.uses.items() if size} == whole.uses


def test_rows_are_nearly_alike() -> None:
    run = run_of(replace(GECKO, num_layers=3), ALONE, batch_size=10)
    assert step_peak(run, ALONE, 0).total == pytest.approx(dry_step(run, ALONE, 0)[0].peak().total, rel=1e-3)


def test_less_is_kept_where_more_is_recomputed() -> None:
    kept, work = [], []
    for mode in ("none", "selective", "full"):
        plan = make_plan(run_of(GECKO, ALONE, activation_checkpointing=mode), 1, GPUS["h100"], Assumptions())
        kept.append(plan.memory["activations kept"])
        work.append(plan.recomputed)
    assert kept == sorted(kept, reverse=True) and work == sorted(work)


def test_carried_states_are_counted() -> None:
    """A GPU holds the states of all its rows before the step, and at the peak those after the first of two parts."""
    run = run_of(GECKO, ALONE, data=CARRIED, gradient_accumulation_steps=2)
    plan = make_plan(run, 1, GPUS["h100"], Assumptions())
    state = gecko.GeckoState.empty(run.model, 4, device="meta")
    assert plan.memory["carried states"] == pytest.approx(1.5 * state.num_bytes, rel=0.05)


def test_accumulation_holds_a_shard_of_the_gradients() -> None:
    """From part to part, a GPU keeps its shard of the gradients and nothing else."""
    shallow, sizes = replace(GECKO, num_layers=3), MeshSizes(1, 2, 1)
    runs = (run_of(shallow, sizes, gradient_accumulation_steps=parts, batch_size=8) for parts in (1, 2, 4))
    one, two, four = (make_plan(run, 2, GPUS["h100"], Assumptions()) for run in runs)
    assert two.memory["gradients"] == four.memory["gradients"] > one.memory["gradients"]
    assert two.memory["activations kept"] > 1.9 * four.memory["activations kept"]
