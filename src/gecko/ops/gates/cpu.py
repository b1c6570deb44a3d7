"""C kernels of the gates: activation, product and change of layout in one pass each for forward and backward. Only the
inputs are saved, which attention and the projections save as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.backends.cpu import call, save, saved


def silu_by_head_cpu(x: Tensor, heads: int) -> Tensor:
    """Compute ``silu_by_head`` in float32."""
    form = SiLUByHeadCPU.apply if torch.is_grad_enabled() else _silu
    y: Tensor = form(x.contiguous(), heads)
    return y


def gated_cpu(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    """Compute ``gated`` in float32."""
    form = GatedCPU.apply if torch.is_grad_enabled() else _gated
    recalled = None if recalled is None else recalled.contiguous()
    out: Tensor = form(attended.contiguous(), gate.contiguous(), recalled)
    return out


def _silu(x: Tensor, heads: int) -> Tensor:
    batch, length, features = x.shape
    y = x.new_empty(batch, heads, length, features // heads)
    call("gates_silu_forward", x, y, *y.shape)
    return y


def _gated(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    out = torch.empty_like(gate)
    call("gates_gated_forward", attended, gate, recalled, out, *attended.shape)
    return out


class SiLUByHeadCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> Tensor:
        save(ctx, x)
        return _silu(x, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = saved(ctx)
        grad_x = torch.empty_like(x)
        call("gates_silu_backward", grad.contiguous(), x, grad_x, *grad.shape)
        return grad_x, None


class GatedCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
        save(ctx, attended, gate)
        return _gated(attended, gate, recalled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        attended, gate = saved(ctx)
        into_attended, into_gate = torch.empty_like(attended), torch.empty_like(gate)
        into_recalled = torch.empty_like(attended) if ctx.needs_input_grad[2] else None
        call(
            "gates_gated_backward", grad.contiguous(), attended, gate, into_attended, into_gate, into_recalled,
            *attended.shape,
        )  # fmt: skip
        return into_attended, into_gate, into_recalled
