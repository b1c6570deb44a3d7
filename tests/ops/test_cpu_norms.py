"""The C kernels of the norms and of qk_scale_shift equal their eager forms."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.laws import assert_same
from support.native_agreement import agree, calls, needs_compiler, normal, on_two_threads, turned
from torch import Tensor

from gecko.ops import norms as native
from gecko.ops import qk_scale_shift as kernels
from gecko.ops.norms import group_layer_norm, group_rms_norm
from gecko.ops.qk_scale_shift import qk_scale_shift

# ---- The C kernels of the norms equal the eager forms at sizes around their blocks, with any number of threads.

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


# ---- The C kernels of qk_scale_shift equal its eager form in float64, at any size.

EPS = 1e-3


def _given(batch: int, length: int, heads: int, size: int, rows: int) -> list[Tensor]:
    return [normal(batch, length, heads * size), normal(rows, heads * size), normal(rows, heads * size, seed=1)]


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (2, 63), (1, 64), (5, 26), (70, 2), (3, 150)])
@pytest.mark.parametrize(("heads", "size", "rows"), [(1, 1, 4), (2, 6, 4), (3, 16, 2), (1, 33, 3), (2, 48, 1)])
def test_qk_scale_shift(batch, length, heads, size, rows):
    """Use sizes around 16 lanes and around tiles of 64 tokens, which may span rows of a batch."""
    agree(lambda *x: qk_scale_shift(*x, heads, EPS), _given(batch, length, heads, size, rows))


@pytest.mark.parametrize(("batch", "length"), [(3, 2200), (1, 4096), (1, 4097)])
def test_more_tiles_than_groups(batch, length):
    agree(lambda *x: qk_scale_shift(*x, 2, EPS), _given(batch, length, 2, 6, 4))


def test_any_strides():
    agree(lambda *x: qk_scale_shift(*x, 3, EPS), list(map(turned, _given(2, 5, 3, 4, 4))), turned)


def test_rows_that_nobody_takes_have_no_gradient():
    given = [x.requires_grad_() for x in _given(2, 70, 2, 20, 4)]
    wide = [x.detach().double().requires_grad_() for x in given]
    weight = normal(2, 2, 70, 20)
    found = torch.autograd.grad(qk_scale_shift(*given, 2, EPS)[2], given, weight)
    exact = torch.autograd.grad(qk_scale_shift(*wide, 2, EPS)[2], wide, weight.double())
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)


def test_sums_over_many_tokens_keep_their_digits():
    """All gradients are one. Float32 sums in sequence would lose digits that the eager form keeps."""
    given = [x.requires_grad_() for x in _given(1, 2**16, 1, 1, 2)]
    row = qk_scale_shift(*given, 1, EPS)[0]
    (offset,) = torch.autograd.grad(row, given[2], torch.full_like(row, 0.1))
    assert abs(offset[0].item() / (0.1 * 2**16) - 1) < 1e-6


def test_no_tokens():
    z, scale = torch.zeros(2, 0, 12, requires_grad=True), torch.zeros(4, 12, requires_grad=True)
    rows = qk_scale_shift(z, scale, scale, 3, EPS)
    assert [row.shape for row in rows] == [(2, 3, 0, 4)] * 4
    assert not torch.autograd.grad(sum(row.sum() for row in rows), scale)[0].any()


def test_float32_takes_the_kernels(monkeypatch):
    names = calls(monkeypatch, kernels)
    given = [x.requires_grad_() for x in _given(2, 5, 3, 4, 4)]
    torch.stack(qk_scale_shift(*given, 3, EPS)).sum().backward()
    assert names == ["qk_scale_shift_forward", "qk_scale_shift_backward"]
    qk_scale_shift(given[0], given[1].double(), given[2], 3, EPS)
    assert len(names) == 2
