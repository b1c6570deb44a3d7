"""SiLU gates of the mixer, which convert between (B, T, H · d) of projections and (B, H, T, d) of attention.

``torch.compile`` uses the references, which it fuses best. The other forms read each tensor once in forward and once in
backward, and save only the inputs, which attention and the projections save as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, save, saved
from gecko.ops.backends.dispatch import choose_backend
from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import check_shape, empty_contiguous, slices

__all__ = ["gated", "gated_reference", "silu_by_head", "silu_by_head_reference"]


def silu_by_head(x: Tensor, heads: int) -> Tensor:
    """Return silu(x) for x (B, T, H · d) as a contiguous (B, H, T, d) in the dtype of x.

    Raises:
        ValueError: ``heads`` does not divide the features of x.
    """
    if x.shape[-1] % heads:
        raise ValueError(f"heads must divide the features of x; got {heads} and {x.shape[-1]}.")
    match choose_backend(x):
        case "triton":
            from gecko.ops.gates.triton import silu_by_head_triton

            return silu_by_head_triton(x, heads)
        case "cpu":
            return SiLUByHeadCPU.run(x, heads)
        case "eager":
            return (silu_by_head_reference if torch.compiler.is_compiling() else SiLUByHead.apply)(x, heads)


def gated(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    """Compute attended · silu(gate) + recalled for all heads.

    Args:
        attended, recalled: (B, H, T, d) of one dtype; recalled None means zeros. gate: (B, T, H · d).

    Returns:
        (B, T, H · d) in the dtype of attended.
    """
    batch, heads, length, features = attended.shape
    check_shape("gate", gate, (batch, length, heads * features))
    check_shape("recalled", recalled, tuple(attended.shape))
    match choose_backend(attended, gate, recalled):
        case "triton":
            from gecko.ops.gates.triton import gated_triton

            return gated_triton(attended, gate, recalled)
        case "cpu":
            return GatedCPU.run(attended, gate, recalled)
        case "eager":
            return (gated_reference if torch.compiler.is_compiling() else Gated.apply)(attended, gate, recalled)


def by_head(x: Tensor, heads: int) -> Tensor:
    """View (B, T, H · d) as (B, H, T, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def silu_by_head_reference(x: Tensor, heads: int) -> Tensor:
    return F.silu(by_head(x, heads)).contiguous()


def gated_reference(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    out = attended * F.silu(by_head(gate, attended.shape[1]))
    return (out if recalled is None else out + recalled).transpose(1, 2).flatten(2)


_silu, _silu_backward = torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input


class SiLUByHead(FirstOrder):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(x)
        source = by_head(x, heads)
        y: Tensor = _silu(source, out=source.new_empty(source.shape))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        grad_x, heads = empty_contiguous(x), grad.shape[1]
        _silu_backward(grad, by_head(x, heads), grad_input=by_head(grad_x, heads))
        return grad_x, None


class Gated(FirstOrder):
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        attended, gate = ctx.saved_tensors
        batch, heads, length, _ = attended.shape
        into_attended, into_gate = map(empty_contiguous, (attended, gate))
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


class SiLUByHeadCPU(CFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> Tensor:
        save(ctx, x)
        batch, length, features = x.shape
        y = x.new_empty(batch, heads, length, features // heads)
        call("gates_silu_forward", x, y, *y.shape)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = saved(ctx)
        grad_x = torch.empty_like(x)
        call("gates_silu_backward", grad, x, grad_x, *grad.shape)
        return grad_x, None


class GatedCPU(CFunction):
    @staticmethod
    def forward(ctx: Any, attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
        save(ctx, attended, gate)
        out = torch.empty_like(gate)
        call("gates_gated_forward", attended, gate, recalled, out, *attended.shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        attended, gate = saved(ctx)
        into_attended, into_gate = torch.empty_like(attended), torch.empty_like(gate)
        into_recalled = torch.empty_like(attended) if ctx.needs_input_grad[2] else None
        into = into_attended, into_gate, into_recalled
        call("gates_gated_backward", grad, attended, gate, *into, *attended.shape)
        return into
