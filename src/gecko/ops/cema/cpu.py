"""C kernels of CEMA. They run the recurrence step by step: no tables, no transposes and one pass over x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.backends.cpu import call, save, saved
from gecko.ops.cema.chunked import CEMACoefficients
from gecko.ops.common import check_shape
from gecko.segments import Segments

_LANES, _TILE, _TOGETHER = 16, 64, 4
"""Same as in cpu.c."""
_GROUPS = 8
"""Number of groups of rows. Each group sums its coefficient gradients separately. The number is constant so that the
sums do not depend on the number of threads."""


def cema_cpu(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute ``cema_chunked`` in float32, without context exchange."""
    skip = x.new_zeros(x.shape[-1]) if skip is None else skip
    factor = torch.view_as_real(coefficients.decay())
    check_shape("coefficients' decay", factor, (*coefficients.input.shape, 2))
    check_shape("coefficients.output", coefficients.output, (*coefficients.input.shape, 2))
    given = (x, coefficients.input, factor, coefficients.output, skip, state)
    inputs = (*(tensor.contiguous() for tensor in given), segments.start_flags)
    return CEMACPU.apply(*inputs) if torch.is_grad_enabled() else _forward(inputs, None, segments.ends)


def _forward(
    given: tuple[Tensor | None, ...], kept: Tensor | None, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x, p, _, _, _, state, _ = given
    assert x is not None and p is not None and state is not None
    y, final = torch.empty_like(x), torch.empty_like(state)
    call("cema_forward", *given, ends, y, kept, final, *x.shape, p.shape[1])
    return y, final


class CEMACPU(torch.autograd.Function):
    """CEMA of x, p (D, N), q and γ (D, N, 2), ω, the state and the document starts, all contiguous."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        x, p, q, gamma, skip, _, starts = given
        kept = _kept(x, p)
        save(ctx, x, p, q, gamma, skip, starts, kept)
        return _forward(given, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        x, p, q, gamma, skip, starts, kept = saved(ctx)
        groups = min(len(x), _GROUPS)
        grad_x, grad_state = torch.empty_like(x), x.new_empty(len(x), *q.shape)
        sums = [t.new_empty(groups, *t.shape) for t in (p, q, gamma, skip)]
        call(
            "cema_backward", x, p, q, gamma, skip, starts, kept, grad.contiguous(), grad_final.contiguous(),
            grad_x, *sums, grad_state, groups, *x.shape, p.shape[1],
        )  # fmt: skip
        return grad_x, *(t.sum(0) for t in sums), grad_state, None


def _kept(x: Tensor, p: Tensor) -> Tensor:
    """Return an empty tensor for the states before every tile."""
    batch, length, channels = x.shape
    modes = -(-p.shape[1] // _TOGETHER) * _TOGETHER
    return x.new_empty(batch, -(-channels // _LANES), -(-length // _TILE), modes, 2, _LANES)
