"""SiLU gates of the mixer, between (B, T, H · d) of the projections and (B, H, T, d) of attention and memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.dtypes import check_shape
from gecko.ops.kernels import kernels_run_on


def silu_by_head(x: Tensor, heads: int) -> Tensor:
    """silu(x) of x (B, T, H · d), as (B, H, T, d), contiguous, in the dtype of x."""
    if kernels_run_on(x):
        from gecko.ops.gates.triton import silu_by_head_kernels

        return silu_by_head_kernels(x, heads)
    return F.silu(_by_head(x, heads))


def gated(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    """attended · silu(gate) + recalled, over all heads.

    Args:
        attended, recalled: (B, H, T, d) of one dtype; recalled may be None for zeros. gate: (B, T, H · d).

    Returns:
        (B, T, H · d) in the dtype of attended.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    batch, heads, length, features = attended.shape
    check_shape("gate", gate, (batch, length, heads * features))
    if recalled is not None:
        check_shape("recalled", recalled, tuple(attended.shape))
    if kernels_run_on(attended):
        from gecko.ops.gates.triton import gated_kernels

        return gated_kernels(attended, gate, recalled)
    factor = F.silu(_by_head(gate, heads))
    out = attended * factor if recalled is None else torch.addcmul(recalled, attended, factor)
    return out.transpose(1, 2).flatten(2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()
