"""Eager forms of the timestep norm: by matrix products over many tokens, and for one token per row.

Only the statistics are recurrent, and they are D/G times smaller than x. For one token the cost per operation
dominates, so that form has few operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.scan import ScanPlan, decayed_sum
from gecko.runtime.tensors import TensorRecord, to_device
from gecko.segments import Segments


@dataclass(frozen=True)
class TimestepNormState(TensorRecord):
    """Running statistics of the current document.

    count: (B,) int64, steps of the document so far.
    mean, variance: (B, G), float32 or wider. Decaying statistics are stored without bias correction.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def empty(
        cls, batch: int, groups: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> TimestepNormState:
        zeros = torch.zeros(batch, groups, dtype=dtype, device=device)
        return cls(torch.zeros(batch, dtype=torch.int64, device=device), zeros, zeros)


class Statistics(NamedTuple):
    """How a timestep norm computes mean and variance: of each group of features, over the document's steps so far."""

    groups: int
    betas: tuple[float, float] | None
    """Decays of mean and variance; None: cumulative."""
    eps: float


def decayed_statistics(
    x: Tensor, groups: int, betas: tuple[float, float], state: TimestepNormState, segments: Segments
) -> tuple[Tensor, Tensor, TimestepNormState]:
    """Return the bias-corrected mean and variance (B, T, G) at every step, and the state after the last step."""
    mu, sigma2 = _GroupMoments.apply(x, groups)
    beta = to_device(torch.tensor(betas, dtype=torch.float64, device="cpu").repeat_interleave(groups), x.device)
    # In float64: from a float32 β = 0.9999, 1 − β would be wrong by 1 part in 1,700.
    added = (1 - beta).to(x.dtype) * torch.cat([mu, sigma2], dim=-1)
    before = torch.cat([state.mean, state.variance], dim=-1)
    running = decayed_sum(added, beta, before, ScanPlan.of(segments))
    count = _counts(state, segments)
    corrected = running / -torch.expm1(count.unsqueeze(-1) * beta.log().to(x.dtype))
    mean, variance = corrected.split(groups, dim=-1)
    last_mean, last_variance = running[:, -1].split(groups, dim=-1)
    return mean, variance, type(state)(count[:, -1], last_mean, last_variance)


def cumulative_statistics(
    x: Tensor, groups: int, state: TimestepNormState, segments: Segments
) -> tuple[Tensor, Tensor, TimestepNormState]:
    """Return mean and variance (B, T, G) over the features of a group in all steps so far, and the state at the end."""
    mu, sigma2 = _GroupMoments.apply(x, groups)
    origin = _origin(mu, state, segments)
    shifted = mu - origin
    before_count = state.count.to(x.dtype).unsqueeze(-1)
    zeros = torch.zeros_like(state.mean)
    # Deviations are summed from an origin near the mean to avoid cancellation. For a document that continues, the
    # origin is its mean so far, so its sum of deviations starts at zero.
    before = torch.cat([zeros, before_count * state.variance], dim=-1)
    added = torch.cat([shifted, sigma2 + shifted.square()], dim=-1)
    sums = decayed_sum(
        added, torch.ones(2 * groups, dtype=torch.float64, device=x.device), before, ScanPlan.of(segments)
    )
    count = _counts(state, segments)
    deviation, square = (sums / count.unsqueeze(-1).to(x.dtype)).split(groups, dim=-1)
    mean, variance = origin + deviation, square - deviation.square()
    return mean, variance, type(state)(count[:, -1], mean[:, -1], variance[:, -1])


def standardise(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return (x − mean) / √(variance + ε) · (1 + weight) + bias, with statistics (B, T, G) per group of features."""
    features = x.shape[-1]
    scale = x.new_ones(features) if weight is None else 1 + weight.to(x.dtype)
    shift = x.new_zeros(features) if bias is None else bias.to(x.dtype)
    return _Standardise.apply(x, mean, torch.rsqrt(variance + eps), scale, shift)


class _Standardise(FirstOrder):
    """(x − mean) · rstd · scale + shift, in fewer passes over x than its parts take; x alone is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean, rstd, scale)
        return torch.addcmul(shift, _normal(x, mean, rstd), scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, mean, rstd, scale = ctx.saved_tensors
        groups = mean.shape[-1]
        product = _normal(x, mean, rstd).mul_(grad)
        # A product with this block-diagonal matrix sums over the features of each group, weighted by scale.
        weights = torch.block_diag(*scale.view(groups, -1, 1))
        grad_scale, grad_shift = product.flatten(0, 1).sum(0), grad.flatten(0, 1).sum(0)
        grad_mean = -(grad @ weights) * rstd
        grad_rstd = (product @ weights) / rstd
        grad_x = ((grad * scale).unflatten(-1, (groups, -1)) * rstd.unsqueeze(-1)).flatten(-2)
        return grad_x, grad_mean, grad_rstd, grad_scale, grad_shift


def _normal(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    groups = mean.shape[-1]
    return (x.unflatten(-1, (groups, -1)) - mean.unsqueeze(-1)).mul_(rstd.unsqueeze(-1)).flatten(-2)


class _GroupMoments(FirstOrder):
    """Mean and biased variance over the features of each group, (B, T, D) to (B, T, G) each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        grouped = x.unflatten(-1, (groups, -1))
        mean = grouped.mean(-1)
        variance = torch.linalg.vector_norm(grouped - mean.unsqueeze(-1), dim=-1).square() / grouped.shape[-1]
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_variance: Tensor) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        grouped = x.unflatten(-1, (mean.shape[-1], -1))
        size = grouped.shape[-1]
        slope = (2 / size * grad_variance).unsqueeze(-1)
        centered = grouped - mean.unsqueeze(-1)
        return centered.mul_(slope).add_((grad_mean / size).unsqueeze(-1)).flatten(-2), None


def _counts(state: TimestepNormState, segments: Segments) -> Tensor:
    """Return the number of steps of the document up to each token, (B, T) int64."""
    return segments.steps_in_document + torch.where(segments.continues, state.count.unsqueeze(1), 0)


def _origin(mu: Tensor, state: TimestepNormState, segments: Segments) -> Tensor:
    """Return the mean so far, (B, T, G), for a document that continues, else the mean of its first step.

    The statistics do not depend on the origin, so only the gradient of the state's mean flows through it.
    """
    length = mu.shape[1]
    first = torch.arange(length, device=mu.device) - (segments.steps_in_document - 1)
    begun = mu.detach().gather(1, first.unsqueeze(-1).expand_as(mu))
    known = segments.continues & (state.count > 0).unsqueeze(1)
    return torch.where(known.unsqueeze(-1), state.mean.unsqueeze(1), begun)


def timestep_norm_step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, state: TimestepNormState,
    segments: Segments,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Compute ``timestep_norm`` with decaying statistics for one token per row, x (B, 1, D)."""
    groups, betas, eps = statistics
    assert betas is not None
    beta, added, log_beta = segments.once(("betas", betas, x.dtype), lambda: _decays(betas, x))
    grouped = x.unflatten(-1, (groups, -1)).squeeze(1)
    variance, mean = torch.var_mean(grouped, -1, correction=0)
    before, steps = torch.stack([state.mean, state.variance], dim=1), state.count
    if segments.starts is not None:
        before, steps = before * segments.continues.unsqueeze(-1), steps * segments.continues[:, 0]
    count = steps + 1
    running = torch.addcmul(added * torch.stack([mean, variance], dim=1), beta, before)
    running_mean, running_variance = running.unbind(1)
    corrected = running / -torch.expm1(count.view(-1, 1, 1) * log_beta).to(running.dtype)
    mean, variance = corrected.unsqueeze(-1).unbind(1)
    y = ((grouped - mean) * torch.rsqrt(variance + eps)).flatten(1).unsqueeze(1)
    y = y if weight is None else y * (1 + weight.to(y.dtype))
    return y if bias is None else y + bias, type(state)(count, running_mean, running_variance)


def _decays(betas: tuple[float, float], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return β, 1 − β and log β of mean and variance, (2, 1) each."""
    beta = to_device(torch.tensor(betas, dtype=torch.float64, device="cpu").unsqueeze(1), x.device)
    # Rounded last: from a float32 β = 0.9999, 1 − β would be wrong by 1 part in 1,700.
    # ONNX computes expm1(x) as exp(x) − 1, which needs float64 if x is small.
    log_beta = beta.log() if torch.compiler.is_exporting() else beta.log().to(x.dtype)
    return beta.to(x.dtype), (1 - beta).to(x.dtype), log_beta
