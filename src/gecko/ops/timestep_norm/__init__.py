"""Timestep normalisation with decaying statistics (paper Eq. 6) or cumulative statistics (Megalodon)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, parts, save, saved
from gecko.ops.backends.dispatch import choose_backend
from gecko.ops.common import check_affine, check_shape, compute_dtype, full_precision, layout_of_call, run_by_length
from gecko.ops.timestep_norm.chunked import (
    Statistics,
    TimestepNormState,
    cumulative_statistics,
    decayed_statistics,
    standardise,
    timestep_norm_step,
)
from gecko.runtime.tensors import to_device
from gecko.segments import Segments

__all__ = ["Statistics", "TimestepNormState", "timestep_norm", "timestep_norm_reference", "timestep_norm_state_before"]


def timestep_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics,
    state: TimestepNormState | None = None, *, segments: Segments | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Compute y_t = (x_t − m̂_t) / √(v̂_t + ε) · (1 + weight) + bias (paper Eq. 6–7). Statistics include step t.

    Decaying (betas given): m ← β₁ m + (1 − β₁) μ_t and v ← β₂ v + (1 − β₂) σ²_t over the steps of the document, where
    μ_t and σ²_t are mean and variance over the features of a group; m̂ = m / (1 − β₁ⁿ), v̂ = v / (1 − β₂ⁿ) after
    n steps. Cumulative (betas None): mean and variance over the features of a group in all steps so far.

    Args:
        x: (B, T, D), any float dtype; statistics are float32 or wider.
        weight, bias: (D,), or both None for no affine part. weight is an offset from 1.

    Returns:
        y (B, T, D) in ``dtype``, by default that of x, and the state after the last step.

    Raises:
        ValueError: the shapes are inconsistent, or the groups do not divide D.
    """
    batch, length, features = x.shape
    groups, betas, eps = statistics
    if features % groups:
        raise ValueError(f"groups must divide the features of x; got {groups} and {features}.")
    check_affine(weight, bias, features)
    wanted, dtype = dtype or x.dtype, compute_dtype(x)
    segments = layout_of_call(segments, batch, length, x.device)
    if state is None:
        given = batch, groups, dtype, x.device
        state = segments.initial(("timestep norm", *given), lambda: TimestepNormState.empty(*given))
    check_shape("state.mean", state.mean, (batch, groups))
    backend = choose_backend(x, weight, bias, state.mean, state.variance, cpu=length > 1)
    if segments.ends is not None and (backend != "cpu" or torch.is_grad_enabled()):
        form = partial(timestep_norm, weight=weight, bias=bias, statistics=statistics, dtype=wanted)
        return run_by_length(form, (x,), state, segments)
    match backend:
        case "triton":
            from gecko.ops.timestep_norm.triton import timestep_norm_triton

            return timestep_norm_triton(x, weight, bias, statistics, state, segments, wanted)
        case "cpu":
            # A float64 tensor: from a float32 β = 0.9999, 1 − β would be wrong by 1 part in 1,700.
            decays = None if betas is None else torch.tensor(betas, dtype=torch.float64, device="cpu")
            check_shape("state.variance", state.variance, state.mean.shape)
            check_shape("state.count", state.count, (batch,))
            before = state.mean, state.variance, state.count.to(torch.int64), segments.start_flags, segments.ends
            y, *after = TimestepNormCPU.run(x, weight, bias, *before, decays, float(eps))
            return y.to(wanted), type(state)(*after)
    wide = x.to(dtype)
    with full_precision(x):
        if betas is not None and length == 1:
            y, state = timestep_norm_step(wide, weight, bias, statistics, state, segments)
            return y.to(wanted), state
        if betas is None:
            mean, variance, state = cumulative_statistics(wide, groups, state, segments)
        else:
            mean, variance, state = decayed_statistics(wide, groups, betas, state, segments)
        return standardise(wide, mean, variance, weight, bias, eps).to(wanted), state


class TimestepNormCPU(CFunction):
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
    def backward(ctx: Any, grad: Tensor, _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, starts, betas, factors, kept = saved(ctx)
        (batch, length, features), groups = x.shape, mean.shape[1]
        grad_x, grad_mean, grad_variance = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
        room, affine = x.new_empty(3, batch, length, groups), x.new_empty(2, parts(batch * length, 16), features)
        call(
            "timestep_norm_backward", x, weight, mean, starts, betas, factors, kept, room, grad, *grads, grad_x,
            *affine, grad_mean, grad_variance, affine.shape[1], batch, length, groups, features // groups,
        )  # fmt: skip
        grad_weight, grad_bias = (None, None) if weight is None else affine.sum(1).unbind()
        return grad_x, grad_weight, grad_bias, grad_mean, grad_variance, None, None, None, None, None


def timestep_norm_state_before(
    x: Tensor, statistics: Statistics, state: TimestepNormState | None, segments: Segments
) -> TimestepNormState | None:
    """Return the state before the tokens x (B, T, D). A rank sends the statistics of x to later ranks.

    They are those of the document at the last token. ``state`` is that before the call; on ranks after the first it is
    None.
    """
    exchange = segments.exchange
    if exchange is None:
        return state
    groups, betas, _ = statistics
    state = state or TimestepNormState.empty(len(x), groups, compute_dtype(x), x.device)
    _, end = timestep_norm(x, None, None, statistics, state, segments=segments)
    (ends,), counts = exchange.send((), [torch.stack([end.mean, end.variance])])(), exchange.counts
    if betas is None:  # pooled, by the steps of each rank
        share = (counts.to(ends.dtype) / counts.sum(0).clamp(min=1).to(ends.dtype)).unsqueeze(-1)
        means, variances = ends.unbind(1)
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
    else:  # decayed over the steps of the ranks between
        beta = to_device(torch.tensor(betas, dtype=torch.float64, device="cpu"), ends.device)
        between = x.shape[1] * torch.arange(len(ends), device=ends.device)
        decay = (beta ** between.unsqueeze(1)).to(ends.dtype)[:, :, None, None]
        mean, variance = (ends * decay * (counts > 0)[:, None, :, None]).sum(0).unbind(0)
    return TimestepNormState(state.count + counts.sum(0), state.mean + mean, state.variance + variance)


def timestep_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, state: TimestepNormState, *,
    segments: Segments,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Compute ``timestep_norm`` step by step, directly from the equations, for x in float32 or wider."""
    groups, betas, eps = statistics
    count, mean, variance, outputs = state.count, state.mean, state.variance, []
    for t, x_t in enumerate(x.unflatten(-1, (groups, -1)).unbind(1)):
        if segments.starts is not None:
            fresh = torch.from_numpy(segments.starts[:, t]).to(x.device)
            count = torch.where(fresh, 0, count)
            mean, variance = torch.where(fresh[:, None], 0, mean), torch.where(fresh[:, None], 0, variance)
        count = count + 1
        mu, sigma2 = x_t.mean(-1), x_t.var(-1, correction=0)
        n = count[:, None].to(x.dtype)
        if betas is None:
            step = mu - mean
            mean = mean + step / n
            variance = variance + (sigma2 + step * (mu - mean) - variance) / n
            center, spread = mean, variance
        else:
            mean = betas[0] * mean + (1 - betas[0]) * mu
            variance = betas[1] * variance + (1 - betas[1]) * sigma2
            center = mean / -torch.expm1(n * math.log(betas[0]))
            spread = variance / -torch.expm1(n * math.log(betas[1]))
        y = (x_t - center[..., None]) * torch.rsqrt(spread[..., None] + eps)
        y = y.flatten(1)
        outputs.append(y if weight is None or bias is None else y * (1 + weight) + bias)
    return torch.stack(outputs, dim=1), TimestepNormState(count, mean, variance)
