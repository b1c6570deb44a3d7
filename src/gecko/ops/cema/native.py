"""CEMA by the C kernels: the recurrence itself, which needs no tables, no transposing and one pass over x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.cema.coefficients import CEMACoefficients
from gecko.ops.native import call
from gecko.segments import Segments

_LANES, _TILE, _TOGETHER = 16, 64, 4
"""As in native.c."""
_GROUPS = 8
"""Of rows whose gradients of coefficients are summed by one thread: a number of its own, so that sums are the same on
any number of threads."""


def cema_native(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Same contract as ``cema_chunked``, for float32 without a handoff."""
    skip = x.new_zeros(x.shape[-1]) if skip is None else skip
    factor = torch.view_as_real(coefficients.decay())
    return _Average.apply(x, coefficients.input, factor, coefficients.output, skip, state, segments.start_flags)


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        *floats, starts = given
        x, p, q, gamma, skip, state = (t.contiguous() for t in (x, *floats) if t is not None)
        y, final = torch.empty_like(x), torch.empty_like(state)
        kept = _kept(x, p) if any(ctx.needs_input_grad) else None
        call("cema_forward", x, p, q, gamma, skip, state, starts, y, kept, final, *x.shape, p.shape[1])
        ctx.save_for_backward(x, p, q, gamma, skip, starts, kept)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        x, p, q, gamma, skip, starts, kept = ctx.saved_tensors
        groups = min(len(x), _GROUPS)
        grad_x, grad_state = torch.empty_like(x), x.new_empty(len(x), *q.shape)
        sums = [t.new_empty(groups, *t.shape) for t in (p, q, gamma, skip)]
        call(
            "cema_backward", x, p, q, gamma, skip, starts, kept, grad.contiguous(), grad_final.contiguous(),
            grad_x, *sums, grad_state, groups, *x.shape, p.shape[1],
        )  # fmt: skip
        return grad_x, *(t.sum(0) for t in sums), grad_state, None


def _kept(x: Tensor, p: Tensor) -> Tensor:
    """Room for the states before every tile."""
    batch, length, channels = x.shape
    modes = -(-p.shape[1] // _TOGETHER) * _TOGETHER
    return x.new_empty(batch, -(-channels // _LANES), -(-length // _TILE), modes, 2, _LANES)
