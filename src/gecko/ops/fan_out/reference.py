"""The fan-out, step by step: what a compiler fuses better than it could the form with gradients by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gecko.ops.norms import group_rms_norm


def fan_out_reference(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Same contract as ``fan_out``, for tensors of one dtype, float32 or wider."""
    normal = group_rms_norm(z, None, heads, eps).unsqueeze(2)
    rows = torch.addcmul(offset, normal, (1 + scale) / math.sqrt(z.shape[-1] // heads))
    return rows.unflatten(-1, (heads, -1)).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
