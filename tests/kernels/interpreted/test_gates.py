"""The kernels of the gates equal their eager forms."""

from __future__ import annotations

import pytest
import torch
from kernels.agreement import agree, is_well_registered, normal

from gecko.ops.feed_forward import swiglu
from gecko.ops.feed_forward import triton as product
from gecko.ops.gates import gated, silu_by_head
from gecko.ops.gates import triton as gates

SHAPES = [(1, 1, 1, 5), (2, 3, 7, 4), (3, 2, 20, 6)]


@pytest.fixture(params=["tiles as launched", "small tiles"])
def tiles(request, monkeypatch):
    if request.param == "small tiles":
        monkeypatch.setattr(gates, "_sizes", lambda h, s: {"heads": h, "size": s, "width": 4, "steps": 4})
        monkeypatch.setattr(product, "BLOCK", 16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_by_head(shape, dtype, tiles):
    batch, heads, length, size = shape
    agree(
        lambda x: gates.silu_by_head_triton(x, heads),
        lambda x: silu_by_head(x, heads),
        (normal(batch, length, heads * size, dtype=dtype),),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recalls", [True, False])
def test_gated(shape, dtype, recalls, tiles):
    batch, heads, length, size = shape
    attended, recalled = (normal(*shape, seed=seed, dtype=dtype) for seed in (1, 2))
    gate = normal(batch, length, heads * size, dtype=dtype)
    agree(gates.gated_triton, gated, (attended, gate, recalled if recalls else None))


@pytest.mark.parametrize("shape", [(1,), (3, 17), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(shape, dtype, tiles):
    agree(product.swiglu_triton, swiglu, [normal(*shape, seed=seed, dtype=dtype) for seed in (1, 2)])


def test_gates_are_well_registered():
    attended, gate = normal(2, 2, 3, 4), normal(2, 3, 8)
    is_well_registered(gates.silu_by_head_triton, gate, 2)
    is_well_registered(gates.gated_triton, attended, gate, normal(2, 2, 3, 4, seed=1))
    is_well_registered(gates.gated_triton, attended, gate, None)
    is_well_registered(product.swiglu_triton, gate, normal(2, 3, 8, seed=1))
