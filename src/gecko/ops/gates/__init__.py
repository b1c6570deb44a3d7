"""SiLU gates of the mixer, which convert between (B, T, H · d) of projections and (B, H, T, d) of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import choose_backend, kernels_of
from gecko.ops.common import check_shape
from gecko.ops.gates.eager import Gated, SiLUByHead, gated_reference, silu_by_head_reference

__all__ = ["gated", "gated_reference", "silu_by_head", "silu_by_head_reference"]


def silu_by_head(x: Tensor, heads: int) -> Tensor:
    """Return silu(x) for x (B, T, H · d) as a contiguous (B, H, T, d) in the dtype of x.

    Raises:
        ValueError: ``heads`` does not divide the features of x.
    """
    if x.shape[-1] % heads:
        raise ValueError(f"heads must divide the features of x; got {heads} and {x.shape[-1]}.")
    match choose_backend(x):
        case "triton":
            from gecko.ops.gates.triton import silu_by_head_triton

            return silu_by_head_triton(x, heads)
        case "cpu":
            return kernels_of("gates", "cpu").silu_by_head_cpu(x, heads)
        case "eager":
            return (silu_by_head_reference if torch.compiler.is_compiling() else SiLUByHead.apply)(x, heads)


def gated(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    """Compute attended · silu(gate) + recalled for all heads.

    Args:
        attended, recalled: (B, H, T, d) of one dtype; recalled None means zeros. gate: (B, T, H · d).

    Returns:
        (B, T, H · d) in the dtype of attended.

    Raises:
        ValueError: the shapes are inconsistent.
    """
    batch, heads, length, features = attended.shape
    check_shape("gate", gate, (batch, length, heads * features))
    if recalled is not None:
        check_shape("recalled", recalled, tuple(attended.shape))
    match choose_backend(attended, gate, recalled):
        case "triton":
            from gecko.ops.gates.triton import gated_triton

            return gated_triton(attended, gate, recalled)
        case "cpu":
            return kernels_of("gates", "cpu").gated_cpu(attended, gate, recalled)
        case "eager":
            return (gated_reference if torch.compiler.is_compiling() else Gated.apply)(attended, gate, recalled)
