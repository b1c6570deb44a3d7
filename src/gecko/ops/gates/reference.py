"""The gates, step by step: what a compiler fuses better than it could the form with gradients by hand."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def by_head(x: Tensor, heads: int) -> Tensor:
    """(B, T, H · d) as a view (B, H, T, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def silu_by_head_reference(x: Tensor, heads: int) -> Tensor:
    """Same contract as ``silu_by_head``."""
    return F.silu(by_head(x, heads)).contiguous()


def gated_reference(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    """Same contract as ``gated``."""
    out = attended * F.silu(by_head(gate, attended.shape[1]))
    return (out if recalled is None else out + recalled).transpose(1, 2).flatten(2)
