"""Plans agree with measurements of small runs."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, baddbmm_flop

import gecko
from gecko.models.gecko import Block
from gecko.parallel.mesh import MeshSizes
from gecko.plan import GPUS, Assumptions, Plan, find_gpu, make_plan
from gecko.plan.counts import counts_of, group_sizes, state_memory
from gecko.recipes import apply_overrides, get_recipe
from gecko.train.optimizer import build_optimizer
from gecko.train.settings import OptimizerSettings, ParallelSettings

BASE: dict[str, Any] = {
    "vocab_size": 64, "num_layers": 2, "model_dim": 128, "key_dim": 64, "value_dim": 256, "num_heads": 2,
    "ffn_dim": 256, "chunk_size": 64, "timestep_groups": 4,
}  # fmt: skip
MEGALODON = {
    "memory": "none", "attention": "chunk", "timestep_betas": None, "cema_skip": "learned", "swiglu": False,
    "two_hop_residual": True,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {}, {"memory": "none"}, {"memory": "linear"}, {"memory": "orthogonal"},
    {"attention": "sliding_window"}, {"vocab_size": 1000},
    {"key_dim": 256, "value_dim": 512, "cema_modes": 8}, {"timestep_groups": 32, "model_dim": 64}, MEGALODON,
]  # fmt: skip
TINY = get_recipe("tiny")
GROWTH = ["schedule.initial_batch_size=1", "schedule.batch_size_steps=900"]


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.plan.triton_kernels_installed", lambda: False)


def config_of(changes: dict[str, Any]) -> gecko.GeckoConfig:
    return gecko.GeckoConfig(**{**BASE, **changes})


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_flops_are_those_of_the_code(changes: dict[str, Any]) -> None:
    config = config_of(changes)
    measured = (counted_flops(config, 512) - counted_flops(config, 256)) / 256
    assert sum(part.total for part in counts_of(config).flops(512).values()) == pytest.approx(measured, rel=1e-6)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_flops_of_recomputation(mode: Literal["selective", "full"]) -> None:
    config = config_of({})
    measured = (counted_flops(config, 512, mode) - counted_flops(config, 256, mode)) / 256
    run = replace(TINY, model=config, activation_checkpointing=mode)
    plan = make_plan(run, 1, find_gpu("h100"), Assumptions())
    # The final norm is not recomputed; it is planned as if it were.
    assert plan.recomputed + sum(part.total for part in plan.flops.values()) == pytest.approx(measured, rel=2e-3)


def counted_flops(config: gecko.GeckoConfig, length: int, mode: Literal["none", "selective", "full"] = "none") -> int:
    """Return the FLOPs of one row, forward and backward."""
    model, tokens = gecko.Gecko(config), torch.zeros(1, length, dtype=torch.int64)
    model.activation_checkpointing = mode

    def in_place(total: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
        return baddbmm_flop(total, a, b)

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: in_place}) as counter:
        model.loss(tokens, tokens).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("changes", [{}, {"tie_embedding": True}, MEGALODON], ids=str)
def test_state_on_one_gpu_is_exact(changes: dict[str, Any], name: Literal["adamw", "muon"]) -> None:
    config = config_of(changes)
    model = gecko.Gecko(config)
    optimizer = build_optimizer(model, OptimizerSettings(name=name))
    model.loss(*[torch.zeros(1, 64, dtype=torch.int64)] * 2).backward()
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert state_memory(config, 1, muon=name == "muon") == {
        "parameters": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None),
        "optimizer": sum(tensor.nbytes for tensor in states),
    }


@pytest.mark.usefixtures("without_triton")
def test_without_kernels_the_plan_is_what_is_exact() -> None:
    plan = make_plan(get_recipe("gecko_7b"), 256, GPUS["h100"], Assumptions())
    assert plan.memory == state_memory(plan.run.model, 8) and plan.fits is None
    alone = ParallelSettings(replicate=1, shard=1, context=1)
    assert make_plan(replace(plan.run, parallel=alone), 1, GPUS["h100"], Assumptions()).fits is False


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_state_divided_among_gpus_is_what_fsdp_gives_the_first(ranks: int) -> None:
    """FSDP splits along the first dimension, as torch.chunk does; the first rank has the largest part."""
    config = config_of({})
    numbers = sum(parameter.chunk(ranks)[0].numel() for parameter in gecko.Gecko(config).parameters())
    assert state_memory(config, ranks)["parameters"] == 4 * numbers


def test_gathered_groups() -> None:
    config = config_of({})
    sizes, half = group_sizes(config, bfloat16=False), group_sizes(config, bfloat16=True)
    total = sum(parameter.numel() for parameter in gecko.Gecko(config).parameters())
    assert sizes.blocks + sizes.rest == sizes.gradients == 4 * total
    assert half.gradients == 4 * total and half.rest == sizes.rest
    matrices = sum(m.weight.numel() for m in Block(config, 0).modules() if isinstance(m, torch.nn.Linear))
    assert sizes.blocks - half.blocks == 2 * 2 * matrices


def test_traffic_of_one_gpu_is_none_and_grows_as_rings_do() -> None:
    config, gpu = config_of({}), GPUS["h100"]
    groups = group_sizes(config, bfloat16=True)

    def planned(*sizes: int, **changes: Any) -> Plan:
        mesh = MeshSizes(*sizes)
        run = replace(TINY, model=config, precision="bfloat16", batch_size=4 * mesh.data_ranks, **changes)
        return Plan(replace(run, gradient_accumulation_steps=2), gpu, mesh, Assumptions())

    def sent(*sizes: int, **changes: Any) -> dict[str, float]:
        return {name: kind.size for name, kind in planned(*sizes, **changes).traffic.items()}

    assert set(sent(1, 1, 1).values()) == {0.0}
    assert sent(1, 4, 1)["gather weights"] == 3 / 4 * 2 * (2 * groups.blocks + groups.rest)
    assert sent(1, 4, 1)["reduce gradients"] == 3 / 4 * 2 * groups.gradients
    captured = sent(1, 4, 1, capture=True)
    assert captured["gather weights"] == captured["reduce gradients"] == 3 / 4 * groups.gradients
    assert sent(8, 4, 1)["sum over replicas"] == 2 * 7 / 8 * groups.gradients / 4
    assert sent(1, 1, 2)["context exchange"] == 2 * 2 * 4 * counts_of(config).context_bytes(2, 2)
    # Measured with gloo: benchmarks/results/context_exchange.md.
    tiny = counts_of(gecko.GeckoConfig.preset("tiny"))
    assert [tiny.context_bytes(4, ranks) for ranks in (2, 4)] == [139_808, 255_584]
    assert planned(1, 16, 1).traffic["reduce gradients"].bandwidth == gpu.network


@pytest.mark.usefixtures("without_triton")
def test_shares_of_the_paper_run() -> None:
    plan = make_plan(get_recipe("gecko_7b"), 256, find_gpu("H100"), Assumptions())
    assert plan.memory["parameters"] == pytest.approx(4 * 7_385_817_088 / 8, rel=0.001)
    assert plan.tokens == 16_384
    assert plan.run.tokens_per_step == 4_194_304
    assert 5 < (plan.days or 0) < 40


def test_time_follows_the_tokens_of_growing_batches() -> None:
    runs = (apply_overrides(TINY, ["steps=1000", *settings]) for settings in ([], GROWTH))
    whole, grown = (make_plan(run, 1, find_gpu("h100"), Assumptions()) for run in runs)
    tokens = grown.run.tokens_before(1000) / whole.run.tokens_before(1000)
    assert whole.days and grown.days == pytest.approx(whole.days * tokens) and tokens < 0.6


def test_a_run_with_adapters_is_not_planned() -> None:
    with pytest.raises(ValueError, match="got lora_rank=8"):
        make_plan(replace(TINY, lora_rank=8, init_from="x", compile=False), 1, find_gpu("h100"), Assumptions())


def test_time_follows_its_assumptions() -> None:
    run, gpu = get_recipe("gecko_7b"), find_gpu("h100")
    whole = make_plan(run, 256, gpu, Assumptions(efficiency=1.0, overlap=1.0))
    half = make_plan(run, 256, gpu, Assumptions(efficiency=0.5, overlap=1.0))
    assert half.computing == pytest.approx(2 * whole.computing)
    flops = sum(part.total for part in whole.flops.values()) + whole.recomputed
    assert whole.computing == pytest.approx(16_384 * flops / 989e12)
    slow = make_plan(run, 256, replace(gpu, node_link=1e9), Assumptions())
    assert slow.step_seconds == pytest.approx(slow.computing * 0.2 + slow.communicating)
    assert 0 < whole.utilisation < 1
    assert make_plan(TINY, 1, find_gpu("a100"), Assumptions()).days is None
