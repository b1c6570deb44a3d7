"""Eager query-key scale and shift with hand-written gradients: each row is written once, and its gradient read once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.common import slices
from gecko.ops.norms import rms_normalise, rms_normalise_grad


class QKScaleShift(torch.autograd.Function):
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
    @once_differentiable
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
