"""Eager forms of the gates: references, which ``torch.compile`` fuses best, and forms with hand-written gradients.

The forms with hand-written gradients read each tensor once in forward and once in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.common import slices


def by_head(x: Tensor, heads: int) -> Tensor:
    """View (B, T, H · d) as (B, H, T, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def silu_by_head_reference(x: Tensor, heads: int) -> Tensor:
    """Reference of ``silu_by_head``."""
    return F.silu(by_head(x, heads)).contiguous()


def gated_reference(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    """Reference of ``gated``."""
    out = attended * F.silu(by_head(gate, attended.shape[1]))
    return (out if recalled is None else out + recalled).transpose(1, 2).flatten(2)


_silu, _silu_backward = torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input


class SiLUByHead(torch.autograd.Function):
    """``silu_by_head`` with a hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(x)
        source = by_head(x, heads)
        y: Tensor = _silu(source, out=source.new_empty(source.shape))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        grad_x, heads = torch.empty_like(x, memory_format=torch.contiguous_format), grad.shape[1]
        _silu_backward(grad, by_head(x, heads), grad_input=by_head(grad_x, heads))
        return grad_x, None


class Gated(torch.autograd.Function):
    """``gated`` with a hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
        ctx.save_for_backward(attended, gate)
        batch, heads, length, _ = attended.shape
        out = torch.empty_like(gate, dtype=attended.dtype, memory_format=torch.contiguous_format)
        gates, places = by_head(gate, heads), by_head(out, heads)
        for rows, steps in slices(batch, length, gate.shape[-1]):
            piece = rows, slice(None), steps
            factor = F.silu(gates[piece]).to(out.dtype)
            if recalled is None:
                torch.mul(attended[piece], factor, out=places[piece])
            else:
                torch.addcmul(recalled[piece], attended[piece], factor, out=places[piece])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        attended, gate = ctx.saved_tensors
        batch, heads, length, _ = attended.shape
        into_attended, into_gate = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (attended, gate)
        )
        into_recalled = torch.empty_like(into_attended) if ctx.needs_input_grad[2] else None
        grads, gates, into_gates = (by_head(x, heads) for x in (grad, gate, into_gate))
        for rows, steps in slices(batch, length, gate.shape[-1]):
            piece = rows, slice(None), steps
            given, gate_piece = grads[piece], gates[piece]
            torch.mul(given, F.silu(gate_piece), out=into_attended[piece])
            _silu_backward((given * attended[piece]).to(gate.dtype), gate_piece, grad_input=into_gates[piece])
            if into_recalled is not None:  # copied to the layout (B, H, T, d) that the memory's products need
                into_recalled[piece] = given
        return into_attended, into_gate, into_recalled
