"""State of the timestep norm before the first token of a call, whose earlier tokens other ranks may hold."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.ops.common import compute_dtype
from gecko.ops.timestep_norm import TimestepNormState, timestep_norm
from gecko.runtime.tensors import to_device
from gecko.segments import Segments


def timestep_norm_state_before(
    x: Tensor, groups: int, betas: tuple[float, float] | None, eps: float, state: TimestepNormState | None,
    segments: Segments,
) -> TimestepNormState | None:  # fmt: skip
    """Return the state before the tokens x (B, T, D). A rank sends the statistics of x to later ranks.

    They are those of the document at the last token. ``state`` is that before the call; on ranks after the first it is
    None.
    """
    exchange = segments.exchange
    if exchange is None:
        return state
    state = state or TimestepNormState.empty(len(x), groups, compute_dtype(x), x.device)
    _, end = timestep_norm(x, None, None, groups, betas, eps, state, segments=segments)
    (ends,) = exchange.send((), [torch.stack([end.mean, end.variance])])()
    merged = _pooled(ends, exchange.counts) if betas is None else _decayed(ends, betas, exchange.counts, x.shape[1])
    mean, variance = merged.unbind(0)
    return TimestepNormState(state.count + exchange.counts.sum(0), state.mean + mean, state.variance + variance)


def _decayed(ends: Tensor, betas: tuple[float, float], counts: Tensor, length: int) -> Tensor:
    """Return the decayed sums (2, B, G) before this rank from ``ends`` (R − 1, 2, B, G), those of earlier ranks."""
    beta = to_device(torch.tensor(betas, dtype=torch.float64, device="cpu"), ends.device)
    between = length * torch.arange(len(ends), device=ends.device)
    decay = (beta ** between.unsqueeze(1)).to(ends.dtype)[:, :, None, None]
    return (ends * decay * (counts > 0)[:, None, :, None]).sum(0)


def _pooled(ends: Tensor, counts: Tensor) -> Tensor:
    """Return mean and variance (2, B, G) of the ``counts`` (R − 1, B) steps whose statistics are ``ends``."""
    held = counts.to(ends.dtype)
    share = (held / held.sum(0).clamp(min=1)).unsqueeze(-1)
    means, variances = ends.unbind(1)
    mean = (share * means).sum(0)
    return torch.stack([mean, (share * (variances + (means - mean).square())).sum(0)])
