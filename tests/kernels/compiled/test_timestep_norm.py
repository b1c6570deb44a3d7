"""The timestep norm's kernels fit the cards at the widths of the presets."""

from __future__ import annotations

import pytest
import torch
from kernels.compiling import CAPABILITIES, check, launches

from gecko.ops.timestep_norm import triton as kernels

BETAS = [0.999, 0.9999]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _both_ways(length: int, features: int, groups: int, dtype: torch.dtype, betas: list[float] | None) -> None:
    x, weight, mean = _empty(2, length, features, dtype=dtype), _empty(features), _empty(2, groups)
    count, begins = _empty(2, dtype=torch.int64), _empty(2, length, dtype=torch.int32)
    fixed = (groups, betas, 1e-5)
    y, _, after, _, carry = kernels._forward(x, weight, weight, count, mean, mean, begins, *fixed)
    kernels._backward(y, after, after, x, weight, count, mean, mean, begins, carry, *fixed)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("length", "features", "groups", "dtype", "betas"),
    [
        (4096, 4096, 64, torch.bfloat16, BETAS),
        (4096, 768, 24, torch.float32, BETAS),
        (4096, 4096, 64, torch.float32, None),
        (1, 4096, 64, torch.bfloat16, BETAS),
    ],
)
def test_timestep_norm_fits(length, features, groups, dtype, betas, capability, monkeypatch):
    for launch in launches(lambda: _both_ways(length, features, groups, dtype, betas), monkeypatch):
        check(launch, capability, registers=168)
