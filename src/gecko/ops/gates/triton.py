"""Triton backend of the mixer's gates: activation, product and change of layout in one kernel.

A program processes some steps and some features of one head. The features of a head are adjacent in both layouts, so
reads and writes are of whole cache lines. Backward computes the activation again. ``gated`` takes 4 passes over
(B, T, H · d) forward and 6 backward, instead of 10 and 12 with separate operations.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile
from gecko.ops.common import contiguous, empty_contiguous

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


def _sizes(heads: int, size: int) -> dict[str, int]:
    width = min(1024, tile(size, 1))
    return {"heads": heads, "size": size, "width": width, "steps": 2048 // width}


def _launch(kernel: Any, batch: int, length: int, heads: int, size: int, **tensors: Tensor | None) -> None:
    sizes = _sizes(heads, size)
    grid = (blocks(batch * length, sizes["steps"]) * heads * blocks(size, sizes["width"]),)
    Launch(kernel, grid, {**contiguous(**tensors), "batch": batch, "length": length, **sizes}, 4).run()


@custom_op("silu_by_head_backward")
def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    batch, heads, length, size = grad.shape
    grad_x = empty_contiguous(x)
    _launch(_silu_gradient, batch, length, heads, size, p_grad=grad, p_x=x, p_grad_x=grad_x)
    return grad_x


@custom_op("silu_by_head", _silu_backward, of=[0], saves=lambda inputs, _: inputs[:1])
def silu_by_head_triton(x: Tensor, heads: int) -> Tensor:
    """Compute ``silu_by_head`` for the dtypes of the kernels."""
    batch, length, features = x.shape
    y = x.new_empty(batch, heads, length, features // heads)
    _launch(_silu, batch, length, heads, features // heads, p_x=x, p_y=y)
    return y


@custom_op("gated_backward")
def _gated_backward(grad: Tensor, attended: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of attended, gate and recalled."""
    batch, heads, length, size = attended.shape
    into_attended, into_gate, into_recalled = map(empty_contiguous, (attended, gate, attended))
    _launch(
        _gate_gradient, batch, length, heads, size, p_grad=grad, p_attended=attended, p_gate=gate,
        p_grad_attended=into_attended, p_grad_gate=into_gate, p_grad_recalled=into_recalled,
    )  # fmt: skip
    return into_attended, into_gate, into_recalled


@custom_op("gated", _gated_backward, of=[0, 1, 2], saves=lambda inputs, _: inputs[:2])
def gated_triton(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
    """Compute ``gated`` for the dtypes of the kernels."""
    batch, heads, length, size = attended.shape
    out = attended.new_empty(batch, length, heads * size)
    _launch(_gate, batch, length, heads, size, p_attended=attended, p_gate=gate, p_recalled=recalled, p_out=out)
    return out


@triton.jit
def _places(batch, length, heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr, steps: tl.constexpr):
    """Return this program's offsets into (B, T, H · d) and into (B, H, T, d), and their mask."""
    across: tl.constexpr = (size + width - 1) // width
    program = tl.program_id(0).to(tl.int64)
    i_head = program // across % heads
    i_step = program // across // heads * steps + tl.arange(0, steps)
    i_s = program % across * width + tl.arange(0, width)
    by_step = ((i_step * heads + i_head) * size)[:, None] + i_s[None]
    by_head = (((i_step // length * heads + i_head) * length + i_step % length) * size)[:, None] + i_s[None]
    return by_step, by_head, (i_step < batch * length.to(tl.int64))[:, None] & (i_s < size)[None]


@triton.jit
def _silu_slope(b_x):
    """Return silu and its derivative."""
    b_sigmoid = tl.sigmoid(b_x)
    return b_x * b_sigmoid, b_sigmoid * (1 + b_x * (1 - b_sigmoid))


@triton.jit(do_not_specialize=["batch", "length"])
def _silu(p_x, p_y, batch, length, heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
          steps: tl.constexpr):  # fmt: skip
    by_step, by_head, m = _places(batch, length, heads, size, width, steps)
    b_y, _ = _silu_slope(tl.load(p_x + by_step, mask=m, other=0.0).to(tl.float32))
    tl.store(p_y + by_head, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["batch", "length"])
def _silu_gradient(p_grad, p_x, p_grad_x, batch, length, heads: tl.constexpr, size: tl.constexpr,
                   width: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    by_step, by_head, m = _places(batch, length, heads, size, width, steps)
    _, b_slope = _silu_slope(tl.load(p_x + by_step, mask=m, other=0.0).to(tl.float32))
    b_grad = tl.load(p_grad + by_head, mask=m, other=0.0).to(tl.float32) * b_slope
    tl.store(p_grad_x + by_step, b_grad.to(p_grad_x.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["batch", "length"])
def _gate(p_attended, p_gate, p_recalled, p_out, batch, length, heads: tl.constexpr, size: tl.constexpr,
          width: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    by_step, by_head, m = _places(batch, length, heads, size, width, steps)
    b_silu, _ = _silu_slope(tl.load(p_gate + by_step, mask=m, other=0.0).to(tl.float32))
    b_out = tl.load(p_attended + by_head, mask=m, other=0.0).to(tl.float32) * b_silu
    if p_recalled is not None:
        b_out += tl.load(p_recalled + by_head, mask=m, other=0.0).to(tl.float32)
    tl.store(p_out + by_step, b_out.to(p_out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["batch", "length"])
def _gate_gradient(p_grad, p_attended, p_gate, p_grad_attended, p_grad_gate, p_grad_recalled, batch, length,
                   heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    by_step, by_head, m = _places(batch, length, heads, size, width, steps)
    b_grad = tl.load(p_grad + by_step, mask=m, other=0.0).to(tl.float32)
    b_silu, b_slope = _silu_slope(tl.load(p_gate + by_step, mask=m, other=0.0).to(tl.float32))
    b_attended = tl.load(p_attended + by_head, mask=m, other=0.0).to(tl.float32)
    tl.store(p_grad_attended + by_head, (b_grad * b_silu).to(p_grad_attended.dtype.element_ty), mask=m)
    tl.store(p_grad_gate + by_step, (b_grad * b_attended * b_slope).to(p_grad_gate.dtype.element_ty), mask=m)
    tl.store(p_grad_recalled + by_head, b_grad.to(p_grad_recalled.dtype.element_ty), mask=m)
