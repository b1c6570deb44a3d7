"""The C kernels of qk_scale_shift equal its eager form in float64, at any size."""

from __future__ import annotations

import pytest
import torch
from support.native_agreement import agree, calls, needs_compiler, normal, turned
from torch import Tensor

from gecko.ops.qk_scale_shift import cpu as kernels
from gecko.ops.qk_scale_shift import qk_scale_shift

pytestmark = needs_compiler

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
