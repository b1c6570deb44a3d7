"""Rotation of heads does not depend on where a tensor lies in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gecko.ops.rotary import rotary_frequencies, rotary_phases, rotate

SHAPE = 2, 3, 5, 4
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "part of odd rows": lambda x: torch.cat([x, x[..., :1]], -1)[..., :4],
    "part of even rows": lambda x: torch.cat([x, x[..., :2]], -1)[..., :4],
    "after an odd part": lambda x: torch.cat([x[..., :1], x, x[..., :1]], -1)[..., 1:5],
    "after an odd number": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "heads side by side in odd rows": lambda x: torch.cat([x.transpose(1, 2).flatten(2), x[:, 0, :, :1]], -1)[..., :12]
    .unflatten(-1, (3, 4)).transpose(1, 2),
    "features apart": lambda x: x.mT.contiguous().mT,
    "steps of two": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "repeated": lambda x: x[:, :1].expand(SHAPE),
}  # fmt: skip


@pytest.mark.parametrize("heads", [0, 1, 3])
@pytest.mark.parametrize("size", [(2, 5), (1, 5), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same(layout: str, size: tuple[int, int], heads: int) -> None:
    """Also for one row or one token, whose strides PyTorch does not count as a layout. So do gradients."""
    rows, length = size
    phases = rotary_phases(torch.arange(length), rotary_frequencies(4, 10_000.0), torch.float64, torch.device("cpu"))
    drawn = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = LAYOUTS[layout](drawn)[:rows, :, :length].requires_grad_()
    plain = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    found, expected = rotate(x, phases, heads), rotate(plain, phases, heads)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad([found, expected], [x, plain], [weights, weights])
    torch.testing.assert_close(*grads, rtol=0, atol=1e-14)
