"""The kernels of the gates, and of ``qk_scale_shift``, equal their eager forms."""

from __future__ import annotations

import pytest
import torch
from kernels.agreement import agree, is_well_registered, normal

from gecko.ops.backends import dispatch
from gecko.ops.feed_forward import swiglu
from gecko.ops.feed_forward import triton as product
from gecko.ops.gates import gated, silu_by_head
from gecko.ops.gates import triton as gates
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.qk_scale_shift import triton as rows_of

EPS = 1e-3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=["tiles as launched", "small tiles"])
def tiles(request, monkeypatch):
    """Several tiles per program, the last of them partial."""
    if request.param == "small tiles":
        monkeypatch.setattr(gates, "_sizes", lambda h, s: {"heads": h, "size": s, "width": 4, "steps": 4})
        monkeypatch.setattr(product, "BLOCK", 16)
        monkeypatch.setattr(rows_of, "PROGRAMS", 2)
        sizes = rows_of._sizes
        monkeypatch.setattr(rows_of, "_sizes", lambda *shape: {**sizes(*shape), "steps": 4})


@DTYPES
@pytest.mark.parametrize("recalls", [True, False])
def test_gates(dtype, recalls, tiles):
    shape = batch, heads, length, size = 2, 3, 7, 6
    attended, recalled = (normal(*shape, seed=seed, dtype=dtype) for seed in (1, 2))
    gate = normal(batch, length, heads * size, dtype=dtype)
    agree(gates.gated_triton, gated, (attended, gate, recalled if recalls else None))
    if recalls:
        agree(lambda x: gates.silu_by_head_triton(x, heads), lambda x: silu_by_head(x, heads), (gate,))


@DTYPES
def test_swiglu(dtype, tiles):
    agree(product.swiglu_triton, swiglu, [normal(3, 17, seed=seed, dtype=dtype) for seed in (1, 2)])


@DTYPES
@pytest.mark.parametrize(("heads", "size", "rows"), [(2, 6, 4), (1, 5, 2)])
def test_qk_scale_shift(heads, size, rows, dtype, tiles):
    agree(
        lambda *leaves: torch.stack(rows_of.qk_scale_shift_triton(*leaves, heads, EPS)),
        lambda *leaves: torch.stack(qk_scale_shift(*leaves, heads, EPS)),
        (normal(3, 11, heads * size, dtype=dtype), normal(rows, heads * size), normal(rows, heads * size)),
    )


@pytest.mark.parametrize("watched", [False, True])
def test_a_row_without_a_gradient_counts_as_zeros(watched, monkeypatch):
    """Only the third row is used, with and without PyTorch's dispatcher."""
    monkeypatch.setattr(dispatch, "is_watched", lambda: watched)
    agree(
        lambda *leaves: rows_of.qk_scale_shift_triton(*leaves, 2, EPS)[2],
        lambda *leaves: qk_scale_shift(*leaves, 2, EPS)[2],
        (normal(2, 9, 16), normal(4, 16), normal(4, 16)),
    )


def test_gates_are_well_registered():
    attended, gate = normal(2, 2, 3, 4), normal(2, 3, 8)
    is_well_registered(gates.silu_by_head_triton, gate, 2)
    is_well_registered(gates.gated_triton, attended, gate, normal(2, 2, 3, 4, seed=1))
    is_well_registered(gates.gated_triton, attended, gate, None)
    is_well_registered(product.swiglu_triton, gate, normal(2, 3, 8, seed=1))
    z, scale = normal(2, 3, 8, dtype=torch.bfloat16), normal(4, 8)
    is_well_registered(rows_of._qk_scale_shift, z, scale, normal(4, 8), 2, EPS)
