"""The kernels of norms, fan-out, gates and loss fit the cards at the widths of the presets."""

from __future__ import annotations

import pytest
import torch
from kernels.compiling import CAPABILITIES, check, launches

from gecko.ops.fan_out import triton as fan_out
from gecko.ops.gates import triton as gates
from gecko.ops.loss import triton as loss
from gecko.ops.norms import triton as norms
from gecko.ops.swiglu import triton as swiglu

STEPS = 4096


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _group_norm(features: int, centered: bool) -> None:
    """As under autocast: float32 in, bfloat16 out."""
    x, weight = _empty(2, STEPS, features, dtype=torch.float32), _empty(features, dtype=torch.float32)
    y = norms._forward(x, weight, weight if centered else None, 1, 1e-5, centered, torch.bfloat16)
    norms._backward(y, x, weight, 1, 1e-5, centered)


def _fan_out(features: int, heads: int) -> None:
    z, scale = _empty(2, STEPS, features), _empty(4, features, dtype=torch.float32)
    fan_out._backward(fan_out._forward(z, scale, scale, heads, 1e-5), z, scale, heads, 1e-5)


def _gates(heads: int, size: int) -> None:
    x = _empty(2, STEPS, heads * size)
    y = gates._silu_forward(x, heads)
    gates._silu_backward(y, x)
    gates._gated_backward(gates._gated_forward(y, x, y), y, x)


def _swiglu() -> None:
    a = _empty(2, STEPS, 8192)
    swiglu._backward(swiglu._forward(a, a), a, a)


def _loss() -> None:
    logits = _empty(STEPS, 50_304, dtype=torch.float32)
    loss._forward(logits, _empty(STEPS, dtype=torch.int64), _empty(dtype=torch.int64), -100, torch.bfloat16)


CALLS = {
    "rms-norm-4096": lambda: _group_norm(4096, False),
    "layer-norm-768": lambda: _group_norm(768, True),
    "fan-out-7b": lambda: _fan_out(1024, 4),
    "fan-out-125m": lambda: _fan_out(384, 4),
    "gates-7b": lambda: _gates(4, 2048),
    "gates-125m": lambda: _gates(4, 384),
    "swiglu": _swiglu,
    "loss": _loss,
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_fit(name, capability, monkeypatch):
    for launch in launches(CALLS[name], monkeypatch):
        check(launch, capability, registers=128)
