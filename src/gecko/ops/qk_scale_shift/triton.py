"""Triton backend of query-key scale and shift: read z once and write every row once, in the layout of attention.

A program processes some steps of one head. Backward computes the norm again. A backward program loops over many steps
and writes one row of the gradients of scale and offset.

Memory traffic for B = 1, T = 32,768, H · d = 1,024 and four rows in bfloat16 (z is 67 MB): forward reads z and writes
four times its size, 0.34 GB; backward reads five times and writes once its size, 0.40 GB. Both are the minimum. Rotary
embedding would add no traffic here. Attention applies it instead, because it rotates keys again for the next chunk and
its state holds rotated keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


PROGRAMS = 512
"""Maximum programs per head of the backward kernel. Each writes a row of the parameter gradients."""
REGISTERS = 128
"""Limit for the backward kernel: two blocks per multiprocessor. Without one, Triton 3.6 takes 174 and fits one block;
with it, neither version spills."""


def qk_scale_shift_triton(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Compute ``qk_scale_shift`` for the dtypes of the kernels."""
    rows: Tensor = _qk_scale_shift(z, scale, offset, heads, eps)
    return rows.unbind(0)


def _sizes(rows: int, features: int, heads: int) -> dict[str, Any]:
    size = features // heads
    width, held = tile(size, 1), tile(rows, 1)
    steps = max(1, 4096 // (width * held))
    return {
        "features": features, "heads": heads, "size": size, "copies": rows, "width": width, "copies_held": held,
        "steps": steps, "factor": size**-0.5,
    }  # fmt: skip


def _forward(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> Tensor:
    (batch, length, features), rows = z.shape, scale.shape[0]
    sizes = _sizes(rows, features, heads)
    out = z.new_empty(rows, batch, heads, length, features // heads)
    Launch(_fan, (batch * blocks(length, sizes["steps"]) * heads,), {
        "p_z": z.contiguous(), "p_scale": scale.contiguous(), "p_offset": offset.contiguous(), "p_out": out,
        "batch": batch, "length": length, "eps": eps, **sizes,
    }, 8).run()  # fmt: skip
    return out


def _backward(grad: Tensor, z: Tensor, scale: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of z, scale and offset."""
    (batch, length, features), rows = z.shape, scale.shape[0]
    sizes = _sizes(rows, features, heads)
    programs = min(blocks(PROGRAMS, batch), blocks(length, sizes["steps"]))
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
    parts = z.new_empty(2, batch * programs, rows, features, dtype=torch.float32)
    Launch(_gradients, (batch * programs * heads,), {
        "p_grad": grad.contiguous(), "p_z": z.contiguous(), "p_scale": scale.contiguous(), "p_grad_z": grad_z,
        "p_scale_parts": parts[0], "p_offset_parts": parts[1], "batch": batch, "length": length, "programs": programs,
        "eps": eps, **sizes,
    }, 8, registers=REGISTERS).run()  # fmt: skip
    return grad_z, parts[0].sum(0).to(scale.dtype), parts[1].sum(0).to(scale.dtype)


_qk_scale_shift = custom_op("qk_scale_shift")(_forward)
_qk_scale_shift_backward = custom_op("qk_scale_shift_backward")(_backward)


@_qk_scale_shift.register_fake
def _(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> Tensor:
    batch, length, features = z.shape
    return z.new_empty(scale.shape[0], batch, heads, length, features // heads)


@_qk_scale_shift_backward.register_fake
def _(grad: Tensor, z: Tensor, scale: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    grad_scale = torch.empty_like(scale, memory_format=torch.contiguous_format)
    return torch.empty_like(z, memory_format=torch.contiguous_format), grad_scale, torch.empty_like(grad_scale)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, scale, offset, *ctx.fixed = inputs
    ctx.save_for_backward(z, scale)
    ctx.offset_dtype = offset.dtype


def _propagate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    z, scale = ctx.saved_tensors
    grad_z, grad_scale, grad_offset = _qk_scale_shift_backward(grad, z, scale, *ctx.fixed)
    return grad_z, grad_scale, grad_offset.to(ctx.offset_dtype), None, None


_qk_scale_shift.register_autograd(_propagate, setup_context=_keep)


# Kernels. Axis 0 is rows of the result, axis 1 steps, axis 2 the features of a head.


@triton.jit
def _normal(p_z, first, m_z, eps, features: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
            steps: tl.constexpr):  # fmt: skip
    """Return z / √(mean(z²) + ε) over the features of a head, (steps, features), rstd (steps, 1), and offsets of z."""
    places = first + tl.arange(0, steps)[:, None] * features + tl.arange(0, width)[None]
    b_z = tl.load(p_z + places, mask=m_z, other=0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_z * b_z, 1) / size + eps)[:, None]
    return b_z * b_rstd, b_rstd, places


@triton.jit
def _out_places(i_row, i_head, begin, i_copy, batch, length, heads: tl.constexpr, size: tl.constexpr,
                width: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Return the offsets in (rows, B, H, T, d) of the steps starting at ``begin``."""
    first = (((i_copy.to(tl.int64) * batch + i_row) * heads + i_head) * length + begin) * size
    return first[:, None, None] + (tl.arange(0, steps)[:, None] * size + tl.arange(0, width)[None])[None]


@triton.jit(do_not_specialize=["batch", "length"])
def _fan(p_z, p_scale, p_offset, p_out, batch, length, eps, factor, features: tl.constexpr, heads: tl.constexpr,
         size: tl.constexpr, copies: tl.constexpr, width: tl.constexpr, copies_held: tl.constexpr,
         steps: tl.constexpr):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i_head, tiles = program % heads, tl.cdiv(length, steps)
    i_row, begin = program // heads // tiles, program // heads % tiles * steps
    i_copy, i_s = tl.arange(0, copies_held), tl.arange(0, width)
    m_z = (begin + tl.arange(0, steps) < length)[:, None] & (i_s < size)[None]
    b_n, _, _ = _normal(
        p_z, (i_row * length + begin) * features + i_head * size, m_z, eps, features, size, width, steps
    )
    i_parameter = i_copy[:, None] * features + i_head * size + i_s[None]
    m_parameter = (i_copy < copies)[:, None] & (i_s < size)[None]
    b_scale = (1 + tl.load(p_scale + i_parameter, mask=m_parameter, other=0.0).to(tl.float32)) * factor
    b_offset = tl.load(p_offset + i_parameter, mask=m_parameter, other=0.0).to(tl.float32)
    b_out = b_n[None] * b_scale[:, None] + b_offset[:, None]
    places = _out_places(i_row, i_head, begin, i_copy, batch, length, heads, size, width, steps)
    tl.store(p_out + places, b_out.to(p_out.dtype.element_ty), mask=(i_copy < copies)[:, None, None] & m_z[None])


@triton.jit(do_not_specialize=["batch", "length", "programs"])
def _gradients(p_grad, p_z, p_scale, p_grad_z, p_scale_parts, p_offset_parts, batch, length, programs, eps, factor,
               features: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, copies: tl.constexpr,
               width: tl.constexpr, copies_held: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Store the gradient of z, and those of scale and offset summed over this program's steps of one batch row and head
    (p_…_parts, (B · programs, rows, H · d))."""
    program = tl.program_id(0).to(tl.int64)
    i_head, i_part = program % heads, program // heads
    i_row = i_part // programs
    i_copy, i_s = tl.arange(0, copies_held), tl.arange(0, width)
    i_parameter = i_copy[:, None] * features + i_head * size + i_s[None]
    m_parameter = (i_copy < copies)[:, None] & (i_s < size)[None]
    b_scale = (1 + tl.load(p_scale + i_parameter, mask=m_parameter, other=0.0).to(tl.float32)) * factor
    # The sum over steps is at the end: in the loop it would synchronise all warps.
    b_scale_part = tl.zeros([copies_held, steps, width], tl.float32)
    b_offset_part = tl.zeros([copies_held, steps, width], tl.float32)
    for begin in range(i_part % programs * steps, length, programs * steps):
        m_z = (begin + tl.arange(0, steps) < length)[:, None] & (i_s < size)[None]
        first = (i_row * length + begin) * features + i_head * size
        b_n, b_rstd, z_places = _normal(p_z, first, m_z, eps, features, size, width, steps)
        places = _out_places(i_row, i_head, begin, i_copy, batch, length, heads, size, width, steps)
        m_grad = (i_copy < copies)[:, None, None] & m_z[None]
        b_grad = tl.load(p_grad + places, mask=m_grad, other=0.0).to(tl.float32)
        b_scale_part += b_grad * b_n[None]
        b_offset_part += b_grad
        b_grad_n = tl.sum(b_grad * b_scale[:, None], 0)
        b_grad_z = (b_grad_n - b_n * (tl.sum(b_grad_n * b_n, 1) / size)[:, None]) * b_rstd
        tl.store(p_grad_z + z_places, b_grad_z.to(p_grad_z.dtype.element_ty), mask=m_z)
    part = i_part * copies * features + i_parameter
    tl.store(p_scale_parts + part, tl.sum(b_scale_part, 1) * factor, mask=m_parameter)
    tl.store(p_offset_parts + part, tl.sum(b_offset_part, 1), mask=m_parameter)
