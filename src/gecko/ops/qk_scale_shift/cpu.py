"""C kernels of query-key scale and shift. They read z and the gradients of the rows once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.backends.cpu import call, save, saved

_TILE = 64
"""Same as in cpu.c."""
_GROUPS = 64
"""Maximum groups of tiles. Each group sums the gradients of scale and offset separately. The number is constant so that
the sums do not depend on the number of threads."""


def qk_scale_shift_cpu(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Compute ``qk_scale_shift`` in float32."""
    form = QKScaleShiftCPU.apply if torch.is_grad_enabled() else _forward
    rows: tuple[Tensor, ...] = form(z.contiguous(), scale.contiguous(), offset.contiguous(), heads, float(eps))
    return rows


def _forward(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    batch, length, features = z.shape
    rows = tuple(z.new_empty(batch, heads, length, features // heads) for _ in range(len(scale)))
    call("qk_scale_shift_forward", z, scale, offset, rows, eps, len(rows), batch, length, heads, features // heads)
    return rows


class QKScaleShiftCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
        save(ctx, z, scale)
        ctx.heads, ctx.eps = heads, eps
        ctx.set_materialize_grads(False)
        return _forward(z, scale, offset, heads, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        z, scale = saved(ctx)
        given = tuple(None if grad is None else grad.contiguous() for grad in grads)
        batch, length, features = z.shape
        groups = min(_GROUPS, -(-batch * length // _TILE))
        grad_z, sums = torch.empty_like(z), z.new_zeros(2, groups, *scale.shape)
        call(
            "qk_scale_shift_backward", z, scale, given, grad_z, *sums,
            ctx.eps, groups, len(scale), batch, length, ctx.heads, features // ctx.heads,
        )  # fmt: skip
        return grad_z, *sums.sum(1), None, None
