"""Reference implementation of the timestep norm: step by step, directly from the equations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.timestep_norm import TimestepNormState


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
    """Compute ``timestep_norm`` for x in float32 or wider."""
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
    return torch.stack(outputs, dim=1), type(state)(count, mean, variance)
