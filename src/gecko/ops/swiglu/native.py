"""SwiGLU by the C kernels: one pass each way, and nothing kept but the two projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.native import call


def swiglu_native(a: Tensor, b: Tensor) -> Tensor:
    """Same contract as ``swiglu``, for float32."""
    form = NativeSwiGLU.apply if torch.is_grad_enabled() else _forward
    y: Tensor = form(a.contiguous(), b.contiguous())
    return y


def _forward(a: Tensor, b: Tensor) -> Tensor:
    y = torch.empty_like(a)
    call("swiglu_forward", a, b, y, a.numel())
    return y


class NativeSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _forward(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
        call("swiglu_backward", grad.contiguous(), a, b, grad_a, grad_b, a.numel())
        return grad_a, grad_b
