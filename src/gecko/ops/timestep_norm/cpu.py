"""Timestep norm by C kernels, with decaying or cumulative statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.backends.cpu import call, save, saved
from gecko.ops.common import check_shape
from gecko.ops.timestep_norm.chunked import TimestepNormState
from gecko.segments import Segments


def timestep_norm_cpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, betas: tuple[float, float] | None, eps: float,
    state: TimestepNormState, segments: Segments,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Compute ``timestep_norm`` in float32, without context exchange."""
    # A float64 tensor: from a float32 β = 0.9999, 1 − β would be wrong by 1 part in 1,700.
    decays = None if betas is None else torch.tensor(betas, dtype=torch.float64, device="cpu")
    check_shape("state.variance", state.variance, state.mean.shape)
    check_shape("state.count", state.count, (len(x),))
    count = state.count.to(torch.int64)
    given = (x, weight, bias, state.mean, state.variance, count, segments.start_flags, segments.ends, decays)
    y, count, mean, variance = TimestepNormCPU.apply(*(t if t is None else t.contiguous() for t in given), float(eps))
    return y, type(state)(count, mean, variance)


_STEPS, _PARTS = 16, 64
"""Minimum steps per part, and maximum number of parts. Each part sums the gradients of weight and bias separately. The
numbers are constant so that the sums do not depend on the number of threads."""


class TimestepNormCPU(torch.autograd.Function):
    """Save x, the mean and rstd of every step and group, and the bias correction factors of every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        weight, bias, mean, variance, count, starts, ends, betas, eps = given
        (batch, length, features), groups = x.shape, mean.shape[1]
        y, final_mean, final_variance = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
        final_count, factors = count.clone(), x.new_empty(batch, length, 2)
        kept = x.new_empty(2, batch, length, groups)
        call(
            "timestep_norm_forward", x, weight, bias, mean, variance, starts, ends, betas, factors, final_count, y,
            kept, final_mean, final_variance, eps, batch, length, groups, features // groups,
        )  # fmt: skip
        ctx.mark_non_differentiable(final_count)
        save(ctx, x, weight, mean, starts, betas, factors, kept)
        return y, final_count, final_mean, final_variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, starts, betas, factors, kept = saved(ctx)
        (batch, length, features), groups = x.shape, mean.shape[1]
        parts = min(_PARTS, -(-batch * length // _STEPS))
        grad_x, grad_mean, grad_variance = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
        room, affine = x.new_empty(3, batch, length, groups), x.new_empty(2, parts, features)
        call(
            "timestep_norm_backward", x, weight, mean, starts, betas, factors, kept, room, grad.contiguous(),
            *(g.contiguous() for g in grads), grad_x, *affine, grad_mean, grad_variance, parts, batch, length, groups,
            features // groups,
        )  # fmt: skip
        grad_weight, grad_bias = (None, None) if weight is None else affine.sum(1).unbind()
        return grad_x, grad_weight, grad_bias, grad_mean, grad_variance, None, None, None, None, None
