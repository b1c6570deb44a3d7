"""One unit vector per head, as several rows of queries and keys (paper Eq. 5–6, 16)."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.ops.dtypes import check_shape, compute_dtype
from gecko.ops.fan_out.eager import FanOut
from gecko.ops.fan_out.reference import fan_out_reference
from gecko.ops.kernels import kernels_of, kernels_run_on, native_runs_on

__all__ = ["fan_out", "fan_out_reference"]


def fan_out(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """n · (1 + scale_i) / √d + offset_i for each row i, with n = z / √(mean(z²) + ε) over each head's d features.

    Args:
        z: (B, T, H · d), any float dtype; statistics are float32 or wider.
        scale, offset: (rows, H · d); scale is stored as an offset from 1.

    Returns:
        The rows, each (B, H, T, d), contiguous, in the dtype of z.

    Raises:
        ValueError: the shapes do not fit, or ``heads`` does not divide the features of z.
    """
    features = z.shape[-1]
    if features % heads:
        raise ValueError(f"heads must divide the features of z; got {heads} and {features}.")
    check_shape("scale", scale, (scale.shape[0], features))
    check_shape("offset", offset, tuple(scale.shape))
    if kernels_run_on(z):
        from gecko.ops.fan_out.triton import fan_out_kernels

        return fan_out_kernels(z, scale, offset, heads, eps)
    if native_runs_on(z, scale, offset):
        return kernels_of("fan_out", "native").fan_out_native(z, scale, offset, heads, eps)
    dtype = compute_dtype(z)
    given = z.to(dtype), scale.to(dtype), offset.to(dtype), heads, eps
    rows = fan_out_reference(*given) if torch.compiler.is_compiling() else FanOut.apply(*given).unbind(0)
    return tuple(row.to(z.dtype) for row in rows)
