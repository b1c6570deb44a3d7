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

# ruff: noqa: RUF005 -- Triton compiles no starred elements of tuples
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment


MOST = 4
"""Most rows of one launch."""
WARPS = 4
"""Warps for a tile of 1,024 numbers."""
PROGRAMS = 512
"""Maximum programs per head of the backward kernel. Each writes a row of the parameter gradients."""


def qk_scale_shift_triton(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Compute ``qk_scale_shift`` for the dtypes of the kernels."""
    if len(scale) <= MOST:
        return tuple(_qk_scale_shift(z, scale, offset, heads, eps))
    first = _qk_scale_shift(z, scale[:MOST], offset[:MOST], heads, eps)
    return *first, *qk_scale_shift_triton(z, scale[MOST:], offset[MOST:], heads, eps)


def _sizes(rows: int, features: int, heads: int) -> dict[str, Any]:
    size = features // heads
    width = tile(size, 1)
    return {
        "features": features, "heads": heads, "size": size, "copies": rows, "width": width,
        "steps": max(1, 1024 // width), "factor": size**-0.5,
    }  # fmt: skip


def _named(name: str, rows: list[Tensor]) -> dict[str, Tensor | None]:
    """Return the rows as arguments of a kernel, None for those that are missing."""
    return {f"p_{name}_{i}": rows[i] if i < len(rows) else None for i in range(MOST)}


def _forward(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> list[Tensor]:
    (batch, length, features), rows = z.shape, len(scale)
    sizes = _sizes(rows, features, heads)
    out = [z.new_empty(batch, heads, length, features // heads) for _ in range(rows)]
    Launch(_fan, (batch * blocks(length, sizes["steps"]) * heads,), {
        "p_z": z.contiguous(), "p_scale": scale.contiguous(), "p_offset": offset.contiguous(), **_named("out", out),
        "length": length, "eps": eps, **sizes,
    }, WARPS).run()  # fmt: skip
    return out


def _backward(grads: list[Tensor], z: Tensor, scale: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of z, and of scale and offset (2, rows, H · d)."""
    (batch, length, features), rows = z.shape, len(scale)
    sizes = _sizes(rows, features, heads)
    programs = min(blocks(PROGRAMS, batch), blocks(length, sizes["steps"]))
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
    parts = z.new_empty(2, batch * programs, rows, features, dtype=torch.float32)
    Launch(_gradients, (batch * programs * heads,), {
        **_named("grad", [grad.contiguous() for grad in grads]), "p_z": z.contiguous(), "p_scale": scale.contiguous(),
        "p_grad_z": grad_z, "p_scale_parts": parts[0], "p_offset_parts": parts[1], "length": length,
        "programs": programs, "eps": eps, **sizes,
    }, WARPS).run()  # fmt: skip
    return grad_z, parts.sum(1)


_qk_scale_shift = custom_op("qk_scale_shift")(_forward)
_qk_scale_shift_backward = custom_op("qk_scale_shift_backward")(_backward)


@_qk_scale_shift.register_fake
def _(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> list[Tensor]:
    batch, length, features = z.shape
    return [z.new_empty(batch, heads, length, features // heads) for _ in range(len(scale))]


@_qk_scale_shift_backward.register_fake
def _(grads: list[Tensor], z: Tensor, scale: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor]:
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
    return grad_z, z.new_empty(2, *scale.shape, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    z, scale, offset, *ctx.fixed = inputs
    ctx.save_for_backward(z, scale)
    ctx.offset_dtype = offset.dtype


def _propagate(ctx: Any, *given: Any) -> tuple[Any, ...]:
    z, scale = ctx.saved_tensors
    # PyTorch's registry passes one list, and an autograd function one gradient per row.
    grads = given[0] if isinstance(given[0], list) else list(given)
    grad_z, affine = _qk_scale_shift_backward(grads, z, scale, *ctx.fixed)
    return grad_z, affine[0].to(scale.dtype), affine[1].to(ctx.offset_dtype), None, None


_qk_scale_shift.register_autograd(_propagate, setup_context=_keep)


# Kernels. Axis 0 is steps, axis 1 the features of a head. Rows of the result have a pointer each, and tiles in tuples.


@triton.jit
def _normal(p_z, first, m_z, eps, features: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
            steps: tl.constexpr):  # fmt: skip
    """Return z / √(mean(z²) + ε) over the features of a head, (steps, features), rstd (steps, 1), and offsets of z."""
    places = first + tl.arange(0, steps)[:, None] * features + tl.arange(0, width)[None]
    b_z = tl.load(p_z + places, mask=m_z, other=0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_z * b_z, 1) / size + eps)[:, None]
    return b_z * b_rstd, b_rstd, places


@triton.jit
def _row_places(i_row, i_head, begin, length, heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
                steps: tl.constexpr):  # fmt: skip
    """Return the offsets in (B, H, T, d) of the steps starting at ``begin``."""
    first = ((i_row * heads + i_head) * length + begin) * size
    return first + tl.arange(0, steps)[:, None] * size + tl.arange(0, width)[None]


@triton.jit
def _load_scale(p_scale, i, i_head, factor, features: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    i_s = tl.arange(0, width)
    b_scale = tl.load(p_scale + i * features + i_head * size + i_s, mask=i_s < size, other=0.0).to(tl.float32)
    return ((1 + b_scale) * factor)[None]


@triton.jit(do_not_specialize=["length"])
def _fan(p_z, p_scale, p_offset, p_out_0, p_out_1, p_out_2, p_out_3, length, eps, factor, features: tl.constexpr,
         heads: tl.constexpr, size: tl.constexpr, copies: tl.constexpr, width: tl.constexpr,
         steps: tl.constexpr):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i_head, tiles = program % heads, tl.cdiv(length, steps)
    i_row, begin = program // heads // tiles, program // heads % tiles * steps
    i_s, p_out = tl.arange(0, width), (p_out_0, p_out_1, p_out_2, p_out_3)
    m_z = (begin + tl.arange(0, steps) < length)[:, None] & (i_s < size)[None]
    first = (i_row * length + begin) * features + i_head * size
    b_n, _, _ = _normal(p_z, first, m_z, eps, features, size, width, steps)
    places = _row_places(i_row, i_head, begin, length, heads, size, width, steps)
    for i in tl.static_range(copies):
        b_scale = _load_scale(p_scale, i, i_head, factor, features, size, width)
        i_offset = i * features + i_head * size + i_s
        b_offset = tl.load(p_offset + i_offset, mask=i_s < size, other=0.0).to(tl.float32)[None]
        tl.store(p_out[i] + places, (b_n * b_scale + b_offset).to(p_z.dtype.element_ty), mask=m_z)


@triton.jit(do_not_specialize=["length", "programs"])
def _gradients(p_grad_0, p_grad_1, p_grad_2, p_grad_3, p_z, p_scale, p_grad_z, p_scale_parts, p_offset_parts, length,
               programs, eps, factor, features: tl.constexpr, heads: tl.constexpr, size: tl.constexpr,
               copies: tl.constexpr, width: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Store the gradient of z, and those of scale and offset summed over this program's steps of one batch row and head
    (p_…_parts, (B · programs, rows, H · d))."""
    program = tl.program_id(0).to(tl.int64)
    i_head, i_part = program % heads, program // heads
    i_row = i_part // programs
    i_s, p_grad = tl.arange(0, width), (p_grad_0, p_grad_1, p_grad_2, p_grad_3)
    b_scale_part, b_offset_part = (), ()
    for _ in tl.static_range(copies):
        # The sum over steps is at the end: in the loop it would synchronise all warps.
        b_scale_part = b_scale_part + (tl.zeros([steps, width], tl.float32),)
        b_offset_part = b_offset_part + (tl.zeros([steps, width], tl.float32),)
    for begin in range(i_part % programs * steps, length, programs * steps):
        m_z = (begin + tl.arange(0, steps) < length)[:, None] & (i_s < size)[None]
        first = (i_row * length + begin) * features + i_head * size
        b_n, b_rstd, z_places = _normal(p_z, first, m_z, eps, features, size, width, steps)
        places = _row_places(i_row, i_head, begin, length, heads, size, width, steps)
        b_grad_n = tl.zeros([steps, width], tl.float32)
        b_scale_sum, b_offset_sum = (), ()
        for i in tl.static_range(copies):
            b_grad = tl.load(p_grad[i] + places, mask=m_z, other=0.0).to(tl.float32)
            b_scale_sum = b_scale_sum + (b_scale_part[i] + b_grad * b_n,)
            b_offset_sum = b_offset_sum + (b_offset_part[i] + b_grad,)
            # Scales are read from the cache again: with the sums, registers would not hold them.
            b_grad_n += b_grad * _load_scale(p_scale, i, i_head, factor, features, size, width)
        b_scale_part, b_offset_part = b_scale_sum, b_offset_sum
        b_grad_z = (b_grad_n - b_n * (tl.sum(b_grad_n * b_n, 1) / size)[:, None]) * b_rstd
        tl.store(p_grad_z + z_places, b_grad_z.to(p_grad_z.dtype.element_ty), mask=m_z)
    for i in tl.static_range(copies):
        part = (i_part * copies + i) * features + i_head * size + i_s
        tl.store(p_scale_parts + part, tl.sum(b_scale_part[i], 0) * factor, mask=i_s < size)
        tl.store(p_offset_parts + part, tl.sum(b_offset_part[i], 0), mask=i_s < size)
