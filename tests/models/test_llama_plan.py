"""The plan of a Llama agrees with measurements of small models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from typer.testing import CliRunner

from gecko.cli import app
from gecko.models import PRESETS, LlamaConfig, build_model
from gecko.models.gecko import ActivationCheckpointing
from gecko.plan import Assumptions, find_gpu, make_plan
from gecko.plan.counts import counts_of
from gecko.plan.memory import group_sizes, inference_memory, parameters_by_component, state_memory
from gecko.recipes import get_recipe
from gecko.train.optimizer import build_optimizer
from gecko.train.settings import OptimizerSettings

BASE = LlamaConfig(vocab_size=64, num_layers=2, model_dim=128, num_heads=4, ffn_dim=256)
VARIANTS = {
    "base": BASE,
    "wide": replace(BASE, ffn_dim=768),
    "grouped": replace(BASE, key_value_heads=1),
    "deep": replace(BASE, num_layers=5, vocab_size=1000, num_heads=2),
}


@pytest.fixture(params=VARIANTS)
def config(request: pytest.FixtureRequest) -> LlamaConfig:
    return VARIANTS[request.param]


def counted_flops(config: LlamaConfig, length: int, mode: ActivationCheckpointing = "none") -> int:
    """Return the FLOPs of one row, forward and backward. Half of attention's pairs are masked, and skipped."""
    model, tokens = build_model(config), torch.zeros(1, length, dtype=torch.int64)
    model.activation_checkpointing = mode

    def forward(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_flop_count(q, k, v) // 2

    def backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return sdpa_backward_flop_count(grad, q, k, v) // 2

    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        model.loss(tokens, tokens).backward()
    return counter.get_total_flops()


def test_flops_are_those_of_the_code(config: LlamaConfig) -> None:
    for length in (64, 256):
        planned = sum(part.total for part in counts_of(config).flops(length).values())
        assert planned == pytest.approx(counted_flops(config, length) / length, rel=1e-4)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_flops_of_recomputation(config: LlamaConfig, mode: ActivationCheckpointing) -> None:
    run = replace(
        get_recipe("compare_llama"), model=config, sequence_length=256, activation_checkpointing=mode, compile=False
    )
    plan = make_plan(run, 1, find_gpu("h100"), Assumptions())
    planned = plan.recomputed + sum(part.total for part in plan.flops.values())
    assert planned == pytest.approx(counted_flops(config, 256, mode) / 256, rel=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_state_on_one_gpu_is_exact(config: LlamaConfig, tied: bool) -> None:
    config = replace(config, tie_embedding=tied)
    model = build_model(config)
    optimizer = build_optimizer(model, OptimizerSettings())
    model.loss(*[torch.zeros(1, 64, dtype=torch.int64)] * 2).backward()
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    sizes = state_memory(config, 1)
    assert sizes == {
        "parameters": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None),
        "optimizer": sum(tensor.nbytes for tensor in states),
    }
    assert group_sizes(config, bfloat16=False).gradients == sizes["parameters"]
    assert 4 * sum(parameters_by_component(config).values()) == sizes["parameters"]
    assert (parameters_by_component(config)["head"] == 0) is tied


def test_keys_and_values_are_what_a_model_holds(config: LlamaConfig) -> None:
    model = build_model(config)
    _, cache = model.read(torch.zeros(1, 37, dtype=torch.int64))
    held = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert sum(counts_of(config).state(37, 4).values()) == held
    short, long = (inference_memory(config, torch.bfloat16, 1, length)["states"] for length in (10, 10_000))
    assert long == 1000 * short


@pytest.fixture
def command() -> Callable[..., Any]:
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_the_run_of_seven_billion_fits(command: Callable[..., Any]) -> None:
    result = command("plan", "llama2_7b", "--gpus", "128", "--gpu", "h100", "--json")
    facts = json.loads(result.stdout)
    assert facts["fits"] and facts["bytes_sent_per_step"]["context exchange"] == 0
    assert set(facts["flops_per_token"]) == {"linear", "attention", "head", "recomputed"}
    assert facts["memory_bytes"]["parameters"] == pytest.approx(4 * 6_738_415_616 / 8, rel=0.001)
    assert "16,384 keys on average" in command("plan", "llama2_7b", "--gpus", "128").stdout
    # The row length of Llama 2, as the recipe says.
    own = ["sequence_length=4096", "batch_size=1024", "model.rope_base=10000", "parallel.replicate=32"]
    assert json.loads(command("plan", "llama2_7b", *own, "--gpus", "256", "--json").stdout)["fits"]


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if isinstance(config, LlamaConfig)])
def test_info_of_a_preset(command: Callable[..., Any], name: str) -> None:
    facts = json.loads(command("info", name, "--json", "--length", "1000").stdout)
    assert facts["parameters"]["total"] == sum(facts["parameters"][part] for part in facts["parameters"]) // 2
    assert set(facts["state_bytes_per_row"]) == {"keys", "values", "total"}
    assert "Keys and values of one sequence of 1,000 tokens" in command("info", name, "--length", "1000").stdout
