"""The C kernels of the norms equal the eager forms at sizes around their blocks, with any number of threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.laws import assert_same
from support.native_agreement import needs_compiler, on_two_threads, turned
from torch import Tensor

from gecko.ops.norms import cpu as native
from gecko.ops.norms import group_layer_norm, group_rms_norm

pytestmark = needs_compiler

SIZES = [
    ((2, 3), 1, 1), ((1, 15), 1, 15), ((16,), 1, 16), ((17,), 1, 17), ((3, 7), 4, 32), ((3, 11), 5, 40),
    ((2, 9), 16, 3), ((2, 9), 17, 16), ((5, 5, 5), 35, 8), ((70, 37), 2, 24), ((1025,), 3, 16), ((2, 5), 1, 1000),
]  # fmt: skip
"""Shape of the steps, number of groups, and width of a group."""


def _read(
    norm: str, size: tuple[tuple[int, ...], int, int], affine: bool, dtype: torch.dtype, laid: bool = False
) -> dict[str, Tensor]:
    shape, groups, width = size
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, generator=generator)
    leaves = {"x": 2 + draw(*shape, groups * width)}
    if affine:
        leaves |= {"weight": draw(groups * width), "bias": draw(groups * width)}
    weights = draw(leaves["x"].shape).to(dtype)
    if norm == "rms":
        leaves.pop("bias", None)
    leaves = {name: t.to(dtype).requires_grad_() for name, t in leaves.items()}
    x, weight, bias = leaves["x"], leaves.get("weight"), leaves.get("bias")
    y = group_rms_norm(x, weight, groups, 1e-3) if norm == "rms" else group_layer_norm(x, weight, bias, groups, 1e-3)
    if laid:
        weights = turned(weights)
    found = torch.autograd.grad(y, list(leaves.values()), weights)
    return {"y": y.detach(), **dict(zip(leaves, found, strict=True))}


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_agree_with_the_eager_form(norm, size, affine):
    """The reference of layer norm over all features is PyTorch's."""
    found = _read(norm, size, affine, torch.float32)
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in found.values())
    assert_same(found, _read(norm, size, affine, torch.float64), 1e-5)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("size", [size for size in SIZES if size[1] > 1], ids=str)
def test_threads_and_layout_change_no_bit(norm, size):
    single = _read(norm, size, True, torch.float32, laid=True)
    double = on_two_threads(lambda: _read(norm, size, True, torch.float32))
    assert all(torch.equal(single[name], double[name]) for name in single)


def test_float32_is_read_by_the_kernels(monkeypatch):
    called = []
    monkeypatch.setattr(native, "call", lambda name, *arguments: called.append(name))
    for norm, groups in (("rms", 1), ("rms", 2), ("layer", 2)):
        called.clear()
        _read(norm, ((3,), groups, 4), True, torch.float64)
        assert called == []
        _read(norm, ((3,), groups, 4), True, torch.float32)
        assert called == ["norms_forward", "norms_backward"]


def test_other_dtypes_of_the_result_are_left_to_the_eager_form(monkeypatch):
    monkeypatch.setattr(native, "call", lambda *arguments: pytest.fail("called"))
    assert group_rms_norm(torch.randn(3, 8), None, 1, 1e-3, torch.bfloat16).dtype == torch.bfloat16
    assert group_rms_norm(torch.randn(3, 8).bfloat16(), None, 1, 1e-3, torch.float32).dtype == torch.float32
