"""The kernels of group RMS norm and group layer norm equal their eager forms."""

from __future__ import annotations

import pytest
import torch
from kernels.agreement import agree, is_well_registered, normal

from gecko.ops.norms import group_layer_norm, group_rms_norm
from gecko.ops.norms import triton as kernels

EPS = 1e-3
SHAPES = [((2, 5, 12), 3), ((7, 10), 1), ((1, 33), 1), ((40, 3, 8), 4)]


@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centered", [True, False])
def test_group_norm(shape, groups, affine, dtype, centered, monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    x, weight, bias = normal(*shape, dtype=dtype), *((normal(shape[-1], seed=s) if affine else None) for s in (1, 2))
    eager = group_layer_norm if centered else lambda x, w, b, g, e: group_rms_norm(x, w, g, e)
    leaves = (x, weight, bias if centered else None)
    agree(
        lambda x, w, b: kernels.group_norm(x, w, b, groups, EPS, centered, dtype),
        lambda x, w, b: eager(x, w, b, groups, EPS),
        leaves,
    )


def test_group_norm_of_steps_that_fill_no_tile_walks_over_all(monkeypatch):
    """Many steps for few programs: each program takes several tiles, and the last tile is partial."""
    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    sizes = kernels._sizes
    monkeypatch.setattr(kernels, "_sizes", lambda *shape: {**sizes(*shape), "steps": 2})
    agree(
        lambda x, w: kernels.group_norm(x, w, None, 2, EPS, False, torch.float32),
        lambda x, w: group_rms_norm(x, w, 2, EPS),
        (normal(13, 6), normal(6)),
    )


def test_group_norm_gives_the_dtype_asked_for_and_the_gradient_that_of_x():
    x, weight = normal(6, 16), normal(16)
    y = kernels.group_norm(x, weight, None, 1, EPS, False, torch.bfloat16)
    assert y.dtype == torch.bfloat16
    agree(
        lambda x, w: kernels.group_norm(x, w, None, 1, EPS, False, torch.bfloat16).float().bfloat16(),
        lambda x, w: group_rms_norm(x, w, 1, EPS),
        (x, weight),
    )


def test_group_norm_reads_tensors_that_are_not_contiguous():
    x = normal(5, 3, 8)
    agree(
        lambda x: kernels.group_norm(x.transpose(0, 1), None, None, 2, EPS, True, torch.float32),
        lambda x: group_layer_norm(x.transpose(0, 1), None, None, 2, EPS),
        (x,),
    )


@pytest.mark.parametrize("centered", [True, False])
def test_group_norm_is_well_registered(centered):
    bias = normal(8) if centered else None
    is_well_registered(kernels._group_norm, normal(3, 8), normal(8), bias, 2, EPS, centered, torch.bfloat16)
