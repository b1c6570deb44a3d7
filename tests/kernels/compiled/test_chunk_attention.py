"""Attention's kernels at the sizes of the presets, on three generations of GPUs."""

from __future__ import annotations

import pytest
import torch
from kernels.compiling import CAPABILITIES, check, launches

from gecko.config import GeckoConfig
from gecko.ops.chunk_attention import triton_layout
from gecko.ops.chunk_attention.triton_narrow import narrow_backward, narrow_forward
from gecko.ops.chunk_attention.triton_wide import wide_backward, wide_forward

SIZES = [
    ("gecko-7b", torch.bfloat16, 255, CAPABILITIES), ("gecko-7b", torch.float32, 255, (80,)),
    ("gecko-125m", torch.bfloat16, 255, (90,)), ("megalodon-7b", torch.bfloat16, 255, (90,)),
    ("gecko-15m", torch.bfloat16, 200, CAPABILITIES), ("tiny", torch.bfloat16, 232, (90,)),
]  # fmt: skip
"""Preset, dtype of values, registers a thread (255 is all there are), capabilities; gecko-1b has gecko-7b's heads."""


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _attend(config: GeckoConfig, dtype: torch.dtype) -> None:
    """Forward and backward of two chunks, the first of which has none before it."""
    heads, chunk, lookback = config.num_heads, config.chunk_size, config.attention != "chunk"
    near = k = _meta(heads, 2 * chunk, config.key_head_dim, dtype=dtype)
    v = _meta(heads, 2 * chunk, config.value_head_dim, dtype=dtype)
    first, log_sum = _meta(1, 2 * chunk, dtype=torch.int32), _meta(heads, 2 * chunk, dtype=torch.float32)
    narrow = config.value_head_dim <= 256
    forward, backward = (narrow_forward, narrow_backward) if narrow else (wide_forward, wide_backward)
    given = near, near if lookback else None, k, v, first
    forward(*given, heads, chunk)
    backward(v, *given, v, log_sum, heads, chunk)


def _different(found):
    """One launch of each kernel and of each of its constants."""
    return {(x.kernel.__name__, x.arguments.get("previous"), x.arguments.get("to_ring")): x for x in found}.values()


@pytest.mark.parametrize(("preset", "dtype", "registers", "capabilities"), SIZES)
def test_attention_fits(preset, dtype, registers, capabilities, monkeypatch):
    found = launches(lambda: _attend(GeckoConfig.preset(preset), dtype), monkeypatch)
    for launch in _different(found):
        for capability in capabilities:
            check(launch, capability, registers=registers)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_laying_fits(capability, monkeypatch):
    x, ring = _meta(1, 4, 4096, 256, dtype=torch.bfloat16), _meta(1, 4, 4096, 256, dtype=torch.float32)
    row, table = _meta(1, dtype=torch.int64), _meta(4096, 256, dtype=torch.float32)

    def lay():
        for rows, to_ring in ((6144, False), (4096, True)):
            triton_layout._lay(x, ring, table, row, row, rows, to_ring, 2048, 4, 0, torch.bfloat16)
            triton_layout._lay_backward(x, table, row, 4096, to_ring, 2048, 4, 0, torch.float32)

    for launch in _different(launches(lay, monkeypatch)):
        check(launch, capability, registers=96)
