"""The gates equal their equations, in the memory layouts of the operators beside them."""

from __future__ import annotations

import pytest
import torch

from gecko.ops import common as slices
from gecko.ops.feed_forward import swiglu
from gecko.ops.gates import gated, gated_reference, silu_by_head, silu_by_head_reference


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def test_silu_by_head():
    x = _draw(2, 5, 12)
    y = silu_by_head(x, 3)
    assert y.shape == (2, 3, 5, 4) and y.is_contiguous()
    for head in range(3):
        torch.testing.assert_close(y[:, head], _silu(x[..., 4 * head : 4 * head + 4]))


@pytest.mark.parametrize("recalls", [True, False])
def test_gated(recalls):
    attended, gate, recalled = _draw(2, 3, 5, 4), _draw(2, 5, 12), _draw(2, 3, 5, 4, seed=1) if recalls else None
    out = gated(attended, gate, recalled)
    assert out.shape == (2, 5, 12)
    for head in range(3):
        own = slice(4 * head, 4 * head + 4)
        expected = attended[:, head] * _silu(gate[..., own]) + (recalled[:, head] if recalls else 0)
        torch.testing.assert_close(out[..., own], expected)


@pytest.mark.parametrize("numbers", [24, 100, 2**17])
@pytest.mark.parametrize("recalls", [True, False])
def test_gradients_in_slices_of_steps_of_rows_and_of_all(numbers, recalls, monkeypatch):
    """The last slice of a row, and of the batch, is smaller than the others."""
    monkeypatch.setattr(slices, "_NUMBERS", numbers)
    x = _draw(3, 5, 12)
    given = _draw(3, 3, 5, 4), x, _draw(3, 3, 5, 4, seed=1) if recalls else None
    torch.testing.assert_close(gated(*given), gated_reference(*given))
    torch.testing.assert_close(silu_by_head(x, 3), silu_by_head_reference(x, 3))
    assert torch.autograd.gradcheck(gated, given)
    assert torch.autograd.gradcheck(lambda x: silu_by_head(x, 3), (x,))


def test_swiglu():
    a, b = _draw(2, 5, 6), _draw(2, 5, 6, seed=1)
    torch.testing.assert_close(swiglu(a, b), _silu(a) * b)


def test_gates_refuse_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="heads must divide the features of x; got 5 and 12"):
        silu_by_head(torch.zeros(1, 2, 12), 5)
    attended = torch.zeros(2, 3, 5, 4)
    with pytest.raises(ValueError, match=r"gate must have shape \(2, 5, 12\); got \(2, 5, 4\)"):
        gated(attended, torch.zeros(2, 5, 4), None)
    with pytest.raises(ValueError, match=r"recalled must have shape \(2, 3, 5, 4\); got \(2, 3, 5, 1\)"):
        gated(attended, torch.zeros(2, 5, 12), torch.zeros(2, 3, 5, 1))
    with pytest.raises(ValueError, match=r"b must have shape \(2, 3\); got \(2, 1\)"):
        swiglu(torch.zeros(2, 3), torch.zeros(2, 1))
