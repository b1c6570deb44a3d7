"""Decaying timestep norm for one token of every row: a few small steps, the fixed cost of which is what counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.timestep_norm import TimestepNormState


def normalise_token(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, betas: tuple[float, float], eps: float,
    state: TimestepNormState, segments: Segments,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Same contract as ``timestep_norm``, for x (B, 1, D)."""
    beta, added, log_beta = segments.shared(("betas", betas, x.dtype), lambda: _decays(betas, x))
    grouped = x.unflatten(-1, (groups, -1)).squeeze(1)
    variance, mean = torch.var_mean(grouped, -1, correction=0)
    before, steps = torch.stack([state.mean, state.variance], dim=1), state.count
    if segments.starts is not None:
        before, steps = before * segments.continues.unsqueeze(-1), steps * segments.continues[:, 0]
    count = steps + 1
    running = torch.addcmul(added * torch.stack([mean, variance], dim=1), beta, before)
    running_mean, running_variance = running.unbind(1)
    corrected = running / -torch.expm1(count.view(-1, 1, 1) * log_beta)
    mean, variance = corrected.unsqueeze(-1).unbind(1)
    y = ((grouped - mean) * torch.rsqrt(variance + eps)).flatten(1).unsqueeze(1)
    y = y if weight is None else y * (1 + weight)
    return y if bias is None else y + bias, type(state)(count, running_mean, running_variance)


def _decays(betas: tuple[float, float], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """β, 1 − β and log β of mean and variance, (2, 1) each."""
    beta = torch.tensor(betas, dtype=torch.float64, device=x.device).unsqueeze(1)
    # Rounded at last: 1 − β in float32 from a float32 β would be off by 1 part in 1,700 for β = 0.9999.
    return beta.to(x.dtype), (1 - beta).to(x.dtype), beta.log().to(x.dtype)
