"""Query-key scale and shift: queries and keys are scaled and shifted copies of one normalised vector per head.

See paper Eq. 5–6 and 16. ``torch.compile`` uses the reference, which it fuses better than hand-written gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import choose_backend, kernels_of
from gecko.ops.common import check_shape, compute_dtype
from gecko.ops.norms import group_rms_norm
from gecko.ops.qk_scale_shift.eager import QKScaleShift


def qk_scale_shift_reference(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Compute ``qk_scale_shift`` for tensors of one dtype, float32 or wider."""
    normal = group_rms_norm(z, None, heads, eps).unsqueeze(2)
    rows = torch.addcmul(offset, normal, (1 + scale) / math.sqrt(z.shape[-1] // heads))
    return rows.unflatten(-1, (heads, -1)).permute(2, 0, 3, 1, 4).contiguous().unbind(0)


__all__ = ["qk_scale_shift", "qk_scale_shift_reference"]


def qk_scale_shift(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Compute n · (1 + scale_i) / √d + offset_i for each row i, with n = z / √(mean(z²) + ε) over a head's d features.

    Args:
        z: (B, T, H · d), any float dtype; statistics are float32 or wider.
        scale, offset: (rows, H · d); scale is an offset from 1.

    Returns:
        The rows, each (B, H, T, d), contiguous, in the dtype of z.

    Raises:
        ValueError: the shapes are inconsistent, or ``heads`` does not divide the features of z.
    """
    features = z.shape[-1]
    if features % heads:
        raise ValueError(f"heads must divide the features of z; got {heads} and {features}.")
    check_shape("scale", scale, (scale.shape[0], features))
    check_shape("offset", offset, tuple(scale.shape))
    match choose_backend(z, scale, offset):
        case "triton":
            from gecko.ops.qk_scale_shift.triton import qk_scale_shift_triton

            return qk_scale_shift_triton(z, scale, offset, heads, eps)
        case "cpu":
            return kernels_of("qk_scale_shift", "cpu").qk_scale_shift_cpu(z, scale, offset, heads, eps)
    dtype = compute_dtype(z)
    given = z.to(dtype), scale.to(dtype), offset.to(dtype), heads, eps
    rows = qk_scale_shift_reference(*given) if torch.compiler.is_compiling() else QKScaleShift.apply(*given).unbind(0)
    return tuple(row.to(z.dtype) for row in rows)
