"""Attention patterns with their rotary embedding, and the ring buffer of 2c tokens with position j in slot j mod 2c."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.config import Attention
from gecko.ops.rotary import rotary_phases, rotate


@dataclass(frozen=True)
class Pattern:
    """One attention pattern. The window of a chunk of queries is that chunk and the ``lookback`` chunks before it."""

    chunk_size: int
    attention: Attention
    rope_base: float
    rope_heads: int

    @property
    def lookback(self) -> int:
        return 0 if self.attention == "chunk" else 1

    @property
    def window(self) -> int:
        return (1 + self.lookback) * self.chunk_size

    def first_slot(self, place: Tensor) -> Tensor:
        """Return the first window slot that a query at ``place`` (0..c−1) of its chunk sees."""
        return place + 1 if self.attention == "sliding_window" else torch.zeros_like(place)

    def last_slot(self, place: Tensor) -> Tensor:
        """Return the query's own slot in its window."""
        return place + self.lookback * self.chunk_size

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, H, T, d) by ``positions`` that broadcast against (B, H, T)."""
        return x if self.rope_heads == 0 else rotate(x, self.phases(x, positions), self.rope_heads)

    def phases(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the phases by which ``rotary.rotate`` rotates x (B, H, T, d)."""
        return rotary_phases(positions, x.shape[-1], self.rope_base, x.dtype, x.device)


def in_order(ring: Tensor, start: int, size: int) -> Tensor:
    """Roll the slots of the ring (B, H, size, d) so that slot ``start`` is first."""
    return ring if start % size == 0 else torch.roll(ring, -start, dims=2)


def ring_after(before: Tensor, new: Tensor, end: int, size: int) -> Tensor:
    """Return the ring after ``new`` tokens, which end before position ``end``. ``before`` is in order of time."""
    kept = min(new.shape[2], size)
    recent = torch.cat([before[:, :, kept:], new[:, :, new.shape[2] - kept :]], dim=2)
    return in_order(recent, -end, size)
