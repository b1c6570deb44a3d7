"""SiLU gates of the mixer, between (B, T, H · d) of the projections and (B, H, T, d) of attention and memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.ops.dtypes import check_shape
from gecko.ops.gates.eager import Gated, SiLUByHead
from gecko.ops.gates.reference import gated_reference, silu_by_head_reference
from gecko.ops.kernels import kernels_of, kernels_run_on, native_runs_on

__all__ = ["gated", "gated_reference", "silu_by_head", "silu_by_head_reference"]


def silu_by_head(x: Tensor, heads: int) -> Tensor:
    """silu(x) of x (B, T, H · d), as (B, H, T, d), contiguous, in the dtype of x.

    Raises:
        ValueError: ``heads`` does not divide the features of x.
    """
    if x.shape[-1] % heads:
        raise ValueError(f"heads must divide the features of x; got {heads} and {x.shape[-1]}.")
    if kernels_run_on(x):
        from gecko.ops.gates.triton import silu_by_head_kernels

        return silu_by_head_kernels(x, heads)
    if torch.compiler.is_compiling():
        return silu_by_head_reference(x, heads)
    if native_runs_on(x):
        return kernels_of("gates", "native").silu_by_head_native(x, heads)
    return SiLUByHead.apply(x, heads)


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
    if torch.compiler.is_compiling():
        return gated_reference(attended, gate, recalled)
    if native_runs_on(attended, gate, *(() if recalled is None else (recalled,))):
        return kernels_of("gates", "native").gated_native(attended, gate, recalled)
    return Gated.apply(attended, gate, recalled)
