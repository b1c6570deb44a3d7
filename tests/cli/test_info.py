"""``gecko info`` reports correct numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gecko
from gecko.cli.plan import readable
from gecko.config import PRESETS
from gecko.models.gecko import Block
from gecko.plan.counts import counts_of
from gecko.plan.dry_run.depth import block_memory
from gecko.plan.memory import inference_memory, parameters_by_component, training_memory
from gecko.segments import Segments

BASE: dict[str, Any] = {
    "vocab_size": 64, "num_layers": 2, "model_dim": 128, "key_dim": 64, "value_dim": 256, "num_heads": 2,
    "ffn_dim": 256, "chunk_size": 64, "timestep_groups": 4,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"tie_embedding": True}, {"memory": "none", "cema_skip": "learned"}])
def test_parameters_add_up(changes: dict[str, Any]) -> None:
    config = gecko.GeckoConfig(**BASE, **changes)
    counts = parameters_by_component(config)
    assert sum(counts.values()) == sum(parameter.numel() for parameter in gecko.Gecko(config).parameters())
    assert counts["embedding"] == 64 * 128
    assert counts["head"] == (0 if config.tie_embedding else 64 * 128)
    assert counts["feed-forward"] == 2 * 3 * 128 * 256
    assert counts["CEMA"] == 2 * (128 * 16 * 4 + 128 + (128 if config.cema_skip == "learned" else 0))
    assert counts["norms"] == 2 * (2 + 1 + 2) * 128 + 2 * 128


@pytest.mark.parametrize("name", [name for name in PRESETS if "tiny" in name])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 3, 200])
def test_a_state_is_as_large_as_it_says(name: str, dtype: torch.dtype, length: int) -> None:
    model = gecko.Gecko(gecko.GeckoConfig.preset(name)).to(dtype)
    state = model.empty_state()
    if length:
        with torch.no_grad():
            _, state = model(torch.zeros(1, length, dtype=torch.int64), state=state)
    assert sum(counts_of(model.config).state(99, dtype.itemsize).values()) == state.num_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"swiglu": False}, {"memory": "none"}, {"attention": "chunk"}, {"model_dim": 256, "ffn_dim": 64},
        {"key_dim": 256, "num_heads": 1, "value_dim": 512}, {"cema_modes": 8, "timestep_groups": 64},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("eager_forms", "no_kernels")
def test_activations_of_a_block_are_those_that_it_saves(changes: dict[str, Any]) -> None:
    config = gecko.GeckoConfig(**{**BASE, **changes})
    kept = [block_memory(config, torch.float32, length).kept for length in (256, 512)]
    assert kept[1] - kept[0] == pytest.approx(kept_for_backward(config, 512) - kept_for_backward(config, 256), rel=0.02)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operators use no Triton kernels."""
    monkeypatch.setattr("gecko.ops.backends.dispatch.triton_kernels_installed", lambda: False)
    block_memory.cache_clear()
    monkeypatch.setattr("gecko.plan.memory.block_memory", block_memory.__wrapped__)


@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.usefixtures("eager_forms", "no_kernels")
def test_activations_of_a_model_are_estimated_well(length: int) -> None:
    """Including the tables, which are half of the total for a short text."""
    config = gecko.GeckoConfig.preset("tiny")
    model, text = gecko.Gecko(config), torch.zeros(1, length, dtype=torch.int64)
    measured = saved(model, lambda: model.loss(text, text))
    activations = training_memory(config, 1, length, recompute=False)["activations"]
    assert activations == pytest.approx(measured, rel=0.15)


def kept_for_backward(config: gecko.GeckoConfig, length: int) -> int:
    """Return the number of bytes that one block saves."""
    block, x = Block(config, 0), torch.randn(1, length, config.model_dim, requires_grad=True)
    return saved(block, lambda: block(x, None, Segments.build(1, length)))


def saved(module: torch.nn.Module, forward: Callable[[], Any]) -> int:
    """Return the number of bytes saved for the backward pass, without the module's parameters."""
    storages = {parameter.untyped_storage().data_ptr(): 0 for parameter in module.parameters()}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storages.values())


def test_inference_needs_no_more_for_a_longer_text() -> None:
    config = gecko.GeckoConfig.preset("gecko-7b")
    short, long = (inference_memory(config, torch.bfloat16, 1, length) for length in (4096, 4_000_000))
    assert short == long
    assert short["weights"] == 2 * 7_385_817_088


def test_json_of_a_preset(command: Callable[..., Any]) -> None:
    result = command("info", "gecko-7b", "--json", "--length", 1000, "--batch", 2)
    facts = json.loads(result.stdout)
    assert facts["parameters"]["total"] == 7_385_817_088
    assert facts["state_bytes_per_row"]["total"] * 2 == facts["memory_bytes"]["inference"]["states"]
    assert facts["memory_bytes"]["training"]["optimizer"] == 2 * 4 * 7_385_817_088
    assert set(facts["memory_bytes"]) == {"inference", "training", "training, activations recomputed"}


def test_a_tilde_is_the_home_folder(
    command: Callable[..., Any], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(run_folder.parent))
    assert command("info", "~/demo").exit_code == 0


def test_sizes_are_readable() -> None:
    assert [readable(n) for n in (0, 999, 1000, 123_456, 7_000_000_000)] == ["0 B", "999 B", "1 KB", "123 KB", "7 GB"]
