"""``qk_scale_shift`` equals its equation, row by row and head by head."""

from __future__ import annotations

import math

import pytest
import torch

from gecko.ops import common as slices
from gecko.ops.qk_scale_shift import qk_scale_shift, qk_scale_shift_reference

EPS = 1e-3


def _draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize(("rows", "heads", "size"), [(4, 2, 6), (2, 3, 4), (2, 1, 5)])
def test_qk_scale_shift(rows, heads, size):
    z, scale, offset = _draw(2, 5, heads * size), _draw(rows, heads * size), _draw(rows, heads * size)
    out = qk_scale_shift(z, scale, offset, heads, EPS)
    assert len(out) == rows
    assert all(row.shape == (2, heads, 5, size) and row.is_contiguous() for row in out)
    for row in range(rows):
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            x = z[..., own]
            normal = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
            expected = normal * (1 + scale[row, own]) / math.sqrt(size) + offset[row, own]
            torch.testing.assert_close(out[row][:, head], expected)
    assert torch.autograd.gradcheck(lambda *x: qk_scale_shift(*x, heads, EPS), (z, scale, offset))


@pytest.mark.parametrize("numbers", [40, 500])
def test_gradients_in_slices_of_steps_and_of_rows(numbers, monkeypatch):
    monkeypatch.setattr(slices, "_NUMBERS", numbers)
    given = _draw(3, 5, 12), _draw(4, 12), _draw(4, 12)
    torch.testing.assert_close(qk_scale_shift(*given, 2, EPS), qk_scale_shift_reference(*given, 2, EPS))
    assert torch.autograd.gradcheck(lambda *x: qk_scale_shift(*x, 2, EPS), given)


def test_sixteen_bit_input_keeps_its_dtype_and_is_rounded_once():
    z, scale = _draw(2, 5, 12, dtype=torch.bfloat16), _draw(4, 12, dtype=torch.float32)
    out = qk_scale_shift(z, scale, scale, 2, EPS)
    for row, exact in zip(out, qk_scale_shift(z.float(), scale, scale, 2, EPS), strict=True):
        assert row.dtype == torch.bfloat16
        assert torch.equal(row, exact.bfloat16())


def test_qk_scale_shift_refuses_shapes_that_do_not_fit():
    z = torch.zeros(1, 2, 12)
    with pytest.raises(ValueError, match="heads must divide the features of z; got 5 and 12"):
        qk_scale_shift(z, torch.zeros(4, 12), torch.zeros(4, 12), 5, EPS)
    with pytest.raises(ValueError, match=r"scale must have shape \(4, 12\); got \(4, 11\)"):
        qk_scale_shift(z, torch.zeros(4, 11), torch.zeros(4, 12), 2, EPS)
    with pytest.raises(ValueError, match=r"offset must have shape \(4, 12\); got \(2, 12\)"):
        qk_scale_shift(z, torch.zeros(4, 12), torch.zeros(2, 12), 2, EPS)
