"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: first temperature, then top-k, then top-p of what top-k left.

    Raises:
        ValueError: a number is out of range.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token always."""
    top_k: int | None = None
    """Keep the k most likely tokens, and those that are exactly as likely as the k-th."""
    top_p: float | None = None
    """Keep the fewest most likely tokens that have at least this probability together; of equals, lower ids."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or above; got {self.temperature}. Try 0.8.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for no limit; got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, or None for no limit; got {self.top_p}.")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from, for a temperature above 0.

    Args:
        logits: (B, V), finite.

    Returns:
        (B, V) float64; rows sum to 1 up to rounding.
    """
    wide = logits.double()
    wide = (wide - wide.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < wide.shape[-1]:
        least = wide.topk(sampling.top_k, dim=-1).values[:, -1:]
        wide = wide.masked_fill(wide < least, -torch.inf)
    chances = wide.softmax(-1)
    return chances if sampling.top_p is None else _nucleus(chances, sampling.top_p)


def draw(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """One token for each row of logits (B, V), which takes one number of the row's generator unless greedy.

    Raises:
        ValueError: logits that are not finite.
    """
    _check_finite(logits)
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    cumulative = probabilities(logits, sampling).cumsum(-1)
    total = cumulative[:, -1:]
    # One number a token from the host, so that a seed means the same on every device.
    uniform = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    # Rounding could bring it up to the total, behind the last token that has any probability.
    point = torch.minimum(uniform.to(total.device) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1).tolist()


def _nucleus(chances: Tensor, top_p: float) -> Tensor:
    ordered, order = chances.sort(dim=-1, descending=True, stable=True)
    more_likely = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(more_likely >= top_p, 0)
    return torch.zeros_like(chances).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def _check_finite(logits: Tensor) -> None:
    finite = logits.isfinite().all(-1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"logits must be finite to choose a token from; got {int(logits[row].isnan().sum())} NaN and "
            f"{int(logits[row].isinf().sum())} infinite of {logits.shape[-1]} in row {row}. "
            "The weights or the reading state hold such values, or 16-bit arithmetic overflows: try float32."
        )
