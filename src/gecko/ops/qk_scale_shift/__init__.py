"""Query-key scale and shift: queries and keys are scaled and shifted copies of one normalised vector per head.

See paper Eq. 5–6 and 16. ``torch.compile`` uses the reference, which it fuses better than hand-written gradients.
With these, each row is written once, and its gradient read once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, parts, save, saved
from gecko.ops.backends.dispatch import choose_backend
from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import check_shape, compute_dtype, slices
from gecko.ops.norms import group_rms_norm, rms_normalise, rms_normalise_grad

__all__ = ["qk_scale_shift", "qk_scale_shift_reference"]


def qk_scale_shift_reference(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Compute ``qk_scale_shift`` for tensors of one dtype, float32 or wider."""
    normal = group_rms_norm(z, None, heads, eps).unsqueeze(2)
    rows = torch.addcmul(offset, normal, _factor(scale, heads))
    return rows.unflatten(-1, (heads, -1)).permute(2, 0, 3, 1, 4).contiguous().unbind(0)


def qk_scale_shift(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Compute n · (1 + scale_i) / √d + offset_i for each row i, with n = z / √(mean(z²) + ε) over a head's d features.

    Args:
        z: (B, T, H · d), any float dtype; statistics are float32 or wider.
        scale, offset: (rows, H · d); scale is an offset from 1. The Triton kernels take 2 or 4 rows: queries and keys
            of attention, and those of the memory.

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
        case "triton" if len(scale) in (2, 4):
            from gecko.ops.qk_scale_shift.triton import qk_scale_shift_triton

            return qk_scale_shift_triton(z, scale, offset, heads, eps)
        case "cpu":
            return QKScaleShiftCPU.run(z, scale, offset, heads, float(eps))
    dtype = compute_dtype(z)
    given = z.to(dtype), scale.to(dtype), offset.to(dtype), heads, eps
    rows = qk_scale_shift_reference(*given) if torch.compiler.is_compiling() else QKScaleShift.apply(*given).unbind(0)
    return tuple(row.to(z.dtype) for row in rows)


class QKScaleShift(FirstOrder):
    """``qk_scale_shift`` for tensors of one dtype, float32 or wider. Returns the rows as one tensor."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> Tensor:
        batch, length, _ = z.shape
        normal, rstd = rms_normalise(z.unflatten(-1, (heads, -1)), eps)
        ctx.save_for_backward(normal, rstd, scale)
        rows = z.new_empty(len(scale), batch, heads, length, normal.shape[-1])
        torch.addcmul(_by_row(offset, heads), normal.transpose(1, 2), _by_row(_factor(scale, heads), heads), out=rows)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, rstd, scale = ctx.saved_tensors
        batch, length, heads, size = normal.shape
        factor = _by_row(_factor(scale, heads), heads)
        grad_z, grad_factor, grad_offset = torch.empty_like(normal), torch.zeros_like(scale), torch.zeros_like(scale)
        for rows, steps in slices(batch, length, len(scale) * heads * size):
            y = normal[rows, steps].transpose(1, 2).contiguous()
            total = torch.zeros_like(y)
            for i, given in enumerate(grad[:, rows, :, steps]):
                grad_offset[i] += given.sum((0, 2)).flatten()
                grad_factor[i] += (given * y).sum((0, 2)).flatten()
                total.addcmul_(given, factor[i])
            grad_z[rows, steps] = rms_normalise_grad(total, y, rstd[rows, steps].transpose(1, 2)).transpose(1, 2)
        return grad_z.flatten(2), grad_factor / math.sqrt(size), grad_offset, None, None


def _factor(scale: Tensor, heads: int) -> Tensor:
    return (1 + scale) / math.sqrt(scale.shape[-1] // heads)


def _by_row(x: Tensor, heads: int) -> Tensor:
    """View (rows, H · d) as (rows, 1, H, 1, d)."""
    return x.view(len(x), 1, heads, 1, -1)


class QKScaleShiftCPU(CFunction):
    @staticmethod
    def forward(ctx: Any, z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
        save(ctx, z, scale)
        ctx.heads, ctx.eps = heads, eps
        ctx.set_materialize_grads(False)
        batch, length, features = z.shape
        rows = tuple(z.new_empty(batch, heads, length, features // heads) for _ in range(len(scale)))
        call("qk_scale_shift_forward", z, scale, offset, rows, eps, len(rows), batch, length, heads, features // heads)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        z, scale = saved(ctx)
        batch, length, features = z.shape
        groups = parts(batch * length, 64)  # of whole tiles in cpu.c
        grad_z, sums = torch.empty_like(z), z.new_zeros(2, groups, *scale.shape)
        call(
            "qk_scale_shift_backward", z, scale, grads, grad_z, *sums,
            ctx.eps, groups, len(scale), batch, length, ctx.heads, features // ctx.heads,
        )  # fmt: skip
        return grad_z, *sums.sum(1), None, None
