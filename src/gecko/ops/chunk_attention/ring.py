"""The ring of the last 2c tokens: position j lies at slot j mod 2c."""

from __future__ import annotations

import torch
from torch import Tensor


def in_order(ring: Tensor, start: int, size: int) -> Tensor:
    """The ring's slots (B, H, size, d), rotated so that slot ``start`` comes first."""
    return ring if start % size == 0 else torch.roll(ring, -start, dims=2)


def ring_after(before: Tensor, new: Tensor, end: int, size: int) -> Tensor:
    """The ring after ``new`` tokens, the last of which stands before position ``end``; ``before`` is in order."""
    kept = min(new.shape[2], size)
    recent = torch.cat([before[:, :, kept:], new[:, :, new.shape[2] - kept :]], dim=2)
    return in_order(recent, -end, size)
