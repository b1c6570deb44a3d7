"""Timestep normalisation with decaying statistics (paper Eq. 6) or cumulative statistics (Megalodon)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import choose_backend, kernels_of
from gecko.ops.common import check_affine, check_segments, check_shape, compute_dtype, full_precision, run_by_length
from gecko.ops.timestep_norm.chunked import (
    TimestepNormState,
    cumulative_statistics,
    decayed_statistics,
    standardise,
    timestep_norm_step,
)
from gecko.segments import Segments

__all__ = ["TimestepNormState", "timestep_norm", "timestep_norm_reference"]


def timestep_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    betas: tuple[float, float] | None,
    eps: float,
    state: TimestepNormState | None = None,
    *,
    segments: Segments | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, TimestepNormState]:
    """Compute y_t = (x_t − m̂_t) / √(v̂_t + ε) · (1 + weight) + bias (paper Eq. 6–7). Statistics include step t.

    Decaying (``betas`` given): m ← β₁ m + (1 − β₁) μ_t and v ← β₂ v + (1 − β₂) σ²_t over the steps of the document,
    where μ_t and σ²_t are mean and variance over the features of a group; m̂ = m / (1 − β₁ⁿ), v̂ = v / (1 − β₂ⁿ) after
    n steps. Cumulative (``betas`` None): mean and variance over the features of a group in all steps so far.

    Args:
        x: (B, T, D), any float dtype; statistics are float32 or wider.
        weight, bias: (D,), or both None for no affine part. weight is an offset from 1.

    Returns:
        y (B, T, D) in ``dtype``, by default that of x, and the state after the last step.

    Raises:
        ValueError: the shapes are inconsistent, or ``groups`` does not divide D.
    """
    batch, length, features = x.shape
    if features % groups:
        raise ValueError(f"groups must divide the features of x; got {groups} and {features}.")
    check_affine(weight, bias, features)
    wanted, dtype = dtype or x.dtype, compute_dtype(x)
    segments = segments or Segments.build(batch, length, device=x.device)
    check_segments(segments, batch, length)
    if state is None:
        given = batch, groups, dtype, x.device
        state = segments.initial(("timestep norm", *given), lambda: TimestepNormState.empty(*given))
    check_shape("state.mean", state.mean, (batch, groups))
    inputs = x, weight, bias, groups, betas, eps, state, segments
    backend = choose_backend(x, weight, bias, state.mean, state.variance, cpu=length > 1)
    if segments.ends is not None and backend != "cpu":
        return run_by_length(
            lambda inputs, state, segments: timestep_norm(
                inputs[0], weight, bias, groups, betas, eps, state, segments=segments, dtype=wanted
            ),
            (x,), state, segments,
        )  # fmt: skip
    match backend:
        case "triton":
            from gecko.ops.timestep_norm.triton import timestep_norm_triton

            return timestep_norm_triton(*inputs, wanted)
        case "cpu":
            y, state = kernels_of("timestep_norm", "cpu").timestep_norm_cpu(*inputs)
            return y.to(wanted), state
    wide = x.to(dtype)
    with full_precision(x):
        if betas is not None and length == 1:
            y, state = timestep_norm_step(wide, weight, bias, groups, betas, eps, state, segments)
            return y.to(wanted), state
        if betas is None:
            mean, variance, state = cumulative_statistics(wide, groups, state, segments)
        else:
            mean, variance, state = decayed_statistics(wide, groups, betas, state, segments)
        return standardise(wide, mean, variance, weight, bias, eps).to(wanted), state


def timestep_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    betas: tuple[float, float] | None,
    eps: float,
    state: TimestepNormState,
    *,
    segments: Segments,
) -> tuple[Tensor, TimestepNormState]:
    """Compute ``timestep_norm`` step by step, directly from the equations, for x in float32 or wider."""
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
