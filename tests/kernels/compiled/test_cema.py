"""The kernels of the moving average fit the cards, in the configurations that would run."""

from __future__ import annotations

import pytest
import torch
from kernels.compiling import CAPABILITIES, check, launches

from gecko.ops.cema import triton, triton_step
from gecko.ops.cema.items import ItemPlan
from gecko.segments import Segments

REGISTERS = {torch.bfloat16: 224, torch.float32: 255}
"""Of a thread: one block of eight warps, or of sixteen with 128, has a multiprocessor for itself."""


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _arguments(channels: int, dtype: torch.dtype, batch: int = 2, length: int = 8192):
    plan = ItemPlan.build(Segments.build(batch, length))
    modes = 16
    x, pairs = _meta(batch, length, channels, dtype=dtype), _meta(channels, modes, 2)
    real, state = _meta(channels, modes), _meta(batch, channels, modes, 2)
    items = [[x.to("meta") for x in some.tensors()] for some in (plan.forwards, plan.backwards)]
    return x, (real, real, real, pairs, _meta(channels)), state, (*items, plan.unit)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", REGISTERS, ids=str)
@pytest.mark.parametrize("channels", [128, 768, 4096])
def test_cema(channels, dtype, capability, monkeypatch):
    x, coefficients, state, plan = _arguments(channels, dtype)

    def call() -> None:
        triton._forward(x, *coefficients, state, *plan)
        triton._backward(x, state, x, *coefficients, state, state, *plan)

    found = launches(call, monkeypatch)
    kernels = [launch.kernel.__name__ for launch in found]
    assert kernels == [
        "response_kernel", "filter_kernel",
        "response_kernel", "filter_kernel", "gradients_kernel", "coefficient_gradients_kernel",
    ]  # fmt: skip
    for launch, name in zip(found, kernels, strict=True):
        over_tokens = name in ("filter_kernel", "gradients_kernel")
        used = check(launch, capability, registers=REGISTERS[dtype] if over_tokens else 128)
        assert used.registers * 32 * launch.warps <= 65_536


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", REGISTERS, ids=str)
def test_cema_step(dtype, capability, monkeypatch):
    _, (real, _, _, pairs, _), state, _ = _arguments(4096, dtype)
    x, continues = _meta(2, 1, 4096, dtype=dtype), _meta(2, dtype=torch.bool)
    (launch,) = launches(lambda: triton_step._step(x, real, pairs, pairs, state, continues), monkeypatch)
    check(launch, capability, registers=64)
