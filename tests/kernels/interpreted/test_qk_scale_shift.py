"""The Triton kernels of ``qk_scale_shift`` equal its eager form."""

from __future__ import annotations

import pytest
import torch
from kernels.agreement import agree, is_well_registered, normal

from gecko.ops.backends import dispatch
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.qk_scale_shift import triton as kernels

EPS = 1e-3


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 11])
@pytest.mark.parametrize(("heads", "size", "rows"), [(2, 6, 4), (1, 5, 2), (3, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_scale_shift(batch, length, heads, size, rows, dtype, monkeypatch):
    """Few programs with small tiles: each program takes several tiles, and the last tile is partial."""
    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    sizes = kernels._sizes
    monkeypatch.setattr(kernels, "_sizes", lambda *shape: {**sizes(*shape), "steps": 4})
    agree(
        lambda *leaves: torch.stack(kernels.qk_scale_shift_triton(*leaves, heads, EPS)),
        lambda *leaves: torch.stack(qk_scale_shift(*leaves, heads, EPS)),
        (normal(batch, length, heads * size, dtype=dtype), normal(rows, heads * size), normal(rows, heads * size)),
    )


def test_qk_scale_shift_in_tiles_as_launched():
    agree(
        lambda *leaves: torch.stack(kernels.qk_scale_shift_triton(*leaves, 2, EPS)),
        lambda *leaves: torch.stack(qk_scale_shift(*leaves, 2, EPS)),
        (normal(2, 40, 48), normal(4, 48), normal(4, 48)),
    )


@pytest.mark.parametrize("watched", [False, True])
def test_a_row_without_a_gradient_counts_as_zeros(watched, monkeypatch):
    """Only the third row is used, with and without PyTorch's dispatcher."""
    monkeypatch.setattr(dispatch, "is_watched", lambda: watched)
    agree(
        lambda *leaves: kernels.qk_scale_shift_triton(*leaves, 2, EPS)[2],
        lambda *leaves: qk_scale_shift(*leaves, 2, EPS)[2],
        (normal(2, 9, 16), normal(4, 16), normal(4, 16)),
    )


def test_qk_scale_shift_is_well_registered():
    is_well_registered(
        kernels._qk_scale_shift, normal(2, 3, 8, dtype=torch.bfloat16), normal(4, 8), normal(4, 8), 2, EPS
    )
