"""The memory's kernels at the sizes of the presets, on three generations of GPUs."""

from __future__ import annotations

import pytest
import torch
from kernels.compiling import CAPABILITIES, check, launches

from gecko.config import GeckoConfig
from gecko.ops.working_memory import triton_features
from gecko.ops.working_memory.triton_chain import chain_backward_forms, chain_forward
from gecko.ops.working_memory.triton_factors import factors_backward, factors_forward

SIZES = [
    ("gecko-7b", torch.bfloat16, CAPABILITIES), ("gecko-7b", torch.float32, (90,)),
    ("gecko-125m", torch.bfloat16, (90,)), ("tiny", torch.bfloat16, (90,)),
]  # fmt: skip
"""Preset, dtype of activations, and capabilities. gecko-1b's heads are gecko-7b's."""


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("preset", "dtype", "capabilities"), SIZES)
def test_chain_fits(preset, dtype, capabilities, monkeypatch):
    config = GeckoConfig.preset(preset)
    keys, values = config.key_head_dim, config.value_head_dim
    a, first, b = _meta(4, 2, keys, keys), _meta(4, keys, values), _meta(4, 3, keys, values)
    memories, rho = _meta(4, 3, keys, values, dtype=dtype), _meta(4, 2, keys)

    def walk():
        chain_forward(a, first, b, rho, first, dtype)
        chain_backward_forms(memories, first, a, first, b, rho, memories)

    for launch in launches(walk, monkeypatch):
        for capability in capabilities:
            check(launch, capability, registers=255)


@pytest.mark.parametrize(("preset", "dtype", "capabilities"), SIZES)
def test_factors_fit(preset, dtype, capabilities, monkeypatch):
    keys = GeckoConfig.preset(preset).key_head_dim
    vector, matrix, vectors, matrices = _meta(4, keys), _meta(4, keys, keys), _meta(4, 3, keys), _meta(4, 3, keys, keys)
    resets = _meta(2, 4, dtype=torch.bool)

    def there_and_back():
        factors_forward(vector, vector, matrix, vectors, matrices, resets, 3)
        factors_backward(matrices, vectors, vector, matrix, vectors, matrices, resets, vectors, vectors)

    for launch in launches(there_and_back, monkeypatch):
        for capability in capabilities:
            check(launch, capability, registers=168)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(("preset", "dtype", "capabilities"), SIZES)
def test_features_fit(preset, dtype, capabilities, adaptive, monkeypatch):
    config = GeckoConfig.preset(preset)
    x = _meta(1, config.num_heads, 2, config.chunk_size, config.key_head_dim, dtype=dtype)
    mask = _meta(1, 1, 2, config.chunk_size, 1, dtype=torch.bool)
    weight = _meta(1, config.num_heads, 2, config.key_head_dim)

    def features():
        triton_features.weigh_forward(x, mask, adaptive)
        triton_features.weigh_backward(weight, x, mask, weight, adaptive)
        triton_features.features(x, mask, weight, weight, adaptive, dtype)
        triton_features.features_backward(x, mask, weight, weight, x.flatten(0, 2), x.flatten(0, 2), adaptive)

    for launch in launches(features, monkeypatch):
        for capability in capabilities:
            check(launch, capability, registers=168)
