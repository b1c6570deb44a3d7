"""The fan-out by the C kernels: z is read once each way, and the rows' gradients once where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.native import call

_TILE = 64
"""As in native.c."""
_GROUPS = 64
"""Of tiles whose gradients of scale and offset are summed by one thread: a number of its own, so that sums are the same
on any number of threads."""


def fan_out_native(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Same contract as ``fan_out``, for float32."""
    form = NativeFanOut.apply if torch.is_grad_enabled() else _forward
    rows: tuple[Tensor, ...] = form(z.contiguous(), scale.contiguous(), offset.contiguous(), heads, float(eps))
    return rows


def _forward(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    batch, length, features = z.shape
    rows = tuple(z.new_empty(batch, heads, length, features // heads) for _ in range(len(scale)))
    call("fan_out_forward", z, scale, offset, rows, eps, len(rows), batch, length, heads, features // heads)
    return rows


class NativeFanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
        ctx.save_for_backward(z, scale)
        ctx.heads, ctx.eps = heads, eps
        ctx.set_materialize_grads(False)
        return _forward(z, scale, offset, heads, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        z, scale = ctx.saved_tensors
        given = tuple(None if grad is None else grad.contiguous() for grad in grads)
        batch, length, features = z.shape
        groups = min(_GROUPS, -(-batch * length // _TILE))
        grad_z, sums = torch.empty_like(z), z.new_zeros(2, groups, *scale.shape)
        call(
            "fan_out_backward", z, scale, given, grad_z, *sums,
            ctx.eps, groups, len(scale), batch, length, ctx.heads, features // ctx.heads,
        )  # fmt: skip
        return grad_z, *sums.sum(1), None, None
