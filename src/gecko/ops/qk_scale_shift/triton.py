"""Triton backend of query-key scale and shift: read z once and write every row once, in the layout of attention.

A program processes some steps of one head. Backward computes the norm again. A backward program loops over many steps
and writes one row of the gradients of scale and offset.

Rotary embedding would add no memory traffic here. Attention applies it instead, because it rotates keys again for the
next chunk and its state holds rotated keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile
from gecko.ops.common import empty_contiguous

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


PROGRAMS = 512
"""Maximum programs per head of the backward kernel. Each writes a row of the parameter gradients."""
WARPS = 4
"""With the tiles of ``_sizes``, a thread loads and stores 128 bits at a time."""
REGISTERS = 128
"""Limit for the backward kernel: four blocks per multiprocessor. Without one, Triton takes 146 for sm_100."""


def qk_scale_shift_triton(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    """Compute ``qk_scale_shift`` for the dtypes of the kernels and 2 or 4 rows."""
    return tuple(_qk_scale_shift(z, scale, offset, heads, eps))


def _sizes(z: Tensor, rows: int, heads: int) -> dict[str, Any]:
    features = z.shape[-1]
    size = features // heads
    width = tile(size, 1)
    steps = max(1, WARPS * 32 * 16 // z.itemsize // width)
    return {
        "features": features, "heads": heads, "size": size, "rows": rows, "width": width, "steps": steps,
        "factor": size**-0.5,
    }  # fmt: skip


def _pointers(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Return the tensors as the kernel's arguments ``name_0`` to ``name_3``; None for missing rows.

    The rows are separate tensors, because autograd would stack the gradients of views of one tensor.
    """
    return {f"{name}_{row}": tensors[row] if row < len(tensors) else None for row in range(4)}


@custom_op("qk_scale_shift_backward")
def _backward(grads: list[Tensor], z: Tensor, scale: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of z, and of scale and offset, (2, rows, D) float32."""
    (batch, length, features), rows = z.shape, scale.shape[0]
    sizes = _sizes(z, rows, heads)
    programs = min(blocks(PROGRAMS, batch), blocks(length, sizes["steps"]))
    grad_z = empty_contiguous(z)
    parts = z.new_empty(2, batch * programs, rows, features, dtype=torch.float32)
    Launch(_gradients, (batch * programs * heads,), {
        **_pointers("p_grad", [grad.contiguous() for grad in grads]), "p_z": z.contiguous(),
        "p_scale": scale.contiguous(), "p_grad_z": grad_z, "p_scale_parts": parts[0], "p_offset_parts": parts[1],
        "batch": batch, "length": length, "programs": programs, "eps": eps, **sizes,
    }, WARPS, registers=REGISTERS).run()  # fmt: skip
    return grad_z, parts.sum(1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    z, scale, offset, *ctx.fixed = inputs
    ctx.save_for_backward(z, scale)
    ctx.offset_dtype = offset.dtype


def _propagate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    z, scale = ctx.saved_tensors
    grad_z, (grad_scale, grad_offset) = _backward(grads, z, scale, *ctx.fixed)
    return grad_z, grad_scale.to(scale.dtype), grad_offset.to(ctx.offset_dtype), None, None


@custom_op("qk_scale_shift")
def _qk_scale_shift(z: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float) -> list[Tensor]:
    (batch, length, features), rows = z.shape, scale.shape[0]
    sizes = _sizes(z, rows, heads)
    out = [z.new_empty(batch, heads, length, features // heads) for _ in range(rows)]
    Launch(_fan, (batch * blocks(length, sizes["steps"]) * heads,), {
        "p_z": z.contiguous(), "p_scale": scale.contiguous(), "p_offset": offset.contiguous(),
        **_pointers("p_out", out), "batch": batch, "length": length, "eps": eps, **sizes,
    }, WARPS).run()  # fmt: skip
    return out


_qk_scale_shift.register_autograd(_propagate, setup_context=_keep)


# Kernels. Axis 0 is steps, axis 1 the features of a head.


@triton.jit
def _places(stride: tl.constexpr, width: tl.constexpr, steps: tl.constexpr):
    """Return the offsets (steps, features) of a tile from its first number."""
    return tl.arange(0, steps)[:, None] * stride + tl.arange(0, width)[None]


@triton.jit
def _normal(p_z, m_z, eps, features: tl.constexpr, size: tl.constexpr, width: tl.constexpr, steps: tl.constexpr):
    """Return z / √(mean(z²) + ε) over the features of a head, (steps, features), and rstd (steps, 1)."""
    b_z = tl.load(p_z + _places(features, width, steps), mask=m_z, other=0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_z * b_z, 1) / size + eps)[:, None]
    return b_z * b_rstd, b_rstd


@triton.jit
def _factor(p_scale, row: tl.constexpr, i_s, i_head, factor, features: tl.constexpr, size: tl.constexpr,
            steps: tl.constexpr):  # fmt: skip
    """Return the factors of a row of the result, (steps, features), in the layout of z. One row of factors would be
    converted to that layout through shared memory, where all warps meet."""
    i = tl.zeros([steps, 1], tl.int32) + (row * features + i_head * size + i_s).to(tl.int32)[None]
    b_scale = tl.load(p_scale + i, mask=tl.broadcast_to((i_s < size)[None], i.shape), other=0.0)
    return (1 + b_scale.to(tl.float32)) * factor


@triton.jit
def _store_row(p_out, m_z, b_n, p_scale, p_offset, row: tl.constexpr, i_s, i_head, factor, features: tl.constexpr,
               size: tl.constexpr, width: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    b_offset = tl.load(p_offset + row * features + i_head * size + i_s, mask=i_s < size, other=0.0)
    b_out = b_n * _factor(p_scale, row, i_s, i_head, factor, features, size, steps) + b_offset.to(tl.float32)[None]
    tl.store(p_out + _places(size, width, steps), b_out.to(p_out.dtype.element_ty), mask=m_z)


@triton.jit(do_not_specialize=["batch", "length"])
def _fan(p_z, p_scale, p_offset, p_out_0, p_out_1, p_out_2, p_out_3, batch, length, eps, factor,
         features: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
         steps: tl.constexpr):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i_head, tiles = program % heads, tl.cdiv(length, steps)
    i_row, begin = program // heads // tiles, program // heads % tiles * steps
    i_s = tl.arange(0, width)
    m_z = (begin + tl.arange(0, steps) < length)[:, None] & (i_s < size)[None]
    p_z += (i_row * length + begin) * features + i_head * size
    first = ((i_row * heads + i_head) * length + begin) * size
    b_n, _ = _normal(p_z, m_z, eps, features, size, width, steps)
    _store_row(p_out_0 + first, m_z, b_n, p_scale, p_offset, 0, i_s, i_head, factor, features, size, width, steps)
    _store_row(p_out_1 + first, m_z, b_n, p_scale, p_offset, 1, i_s, i_head, factor, features, size, width, steps)
    if rows == 4:
        _store_row(p_out_2 + first, m_z, b_n, p_scale, p_offset, 2, i_s, i_head, factor, features, size, width, steps)
        _store_row(p_out_3 + first, m_z, b_n, p_scale, p_offset, 3, i_s, i_head, factor, features, size, width, steps)


@triton.jit
def _add_row(p_grad, places, m_z, b_n, b_grad_n, b_factor, b_scale_part, b_offset_part):
    """Add the gradient of a row of the result to those of n, of its scale and of its offset."""
    b_grad = tl.load(p_grad + places, mask=m_z, other=0.0).to(tl.float32)
    return b_grad_n + b_grad * b_factor, b_scale_part + b_grad * b_n, b_offset_part + b_grad


@triton.jit
def _store_part(p_scale_parts, p_offset_parts, part, row: tl.constexpr, i_s, b_scale_part, b_offset_part, factor,
                features: tl.constexpr, size: tl.constexpr):  # fmt: skip
    i_parameter = part + row * features + i_s
    tl.store(p_scale_parts + i_parameter, tl.sum(b_scale_part, 0) * factor, mask=i_s < size)
    tl.store(p_offset_parts + i_parameter, tl.sum(b_offset_part, 0), mask=i_s < size)


@triton.jit(do_not_specialize=["batch", "length", "programs"])
def _gradients(p_grad_0, p_grad_1, p_grad_2, p_grad_3, p_z, p_scale, p_grad_z, p_scale_parts, p_offset_parts, batch,
               length, programs, eps, factor, features: tl.constexpr, heads: tl.constexpr, size: tl.constexpr,
               rows: tl.constexpr, width: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Store the gradient of z, and those of scale and offset summed over this program's steps of one batch row and head
    (p_…_parts, (B · programs, rows, H · d))."""
    program = tl.program_id(0).to(tl.int64)
    i_head, i_part = program % heads, program // heads
    i_row = i_part // programs
    i_s = tl.arange(0, width)
    # The sums over steps are at the end: in the loop they would synchronise all warps.
    b_none = tl.zeros([steps, width], tl.float32)
    b_s0, b_s1, b_s2, b_s3 = b_none, b_none, b_none, b_none
    b_o0, b_o1, b_o2, b_o3 = b_none, b_none, b_none, b_none
    for begin in range(i_part % programs * steps, length, programs * steps):
        m_z = (begin + tl.arange(0, steps) < length)[:, None] & (i_s < size)[None]
        z_first = (i_row * length + begin) * features + i_head * size
        first = ((i_row * heads + i_head) * length + begin) * size
        b_n, b_rstd = _normal(p_z + z_first, m_z, eps, features, size, width, steps)
        places = _places(size, width, steps)
        b_grad_n = tl.zeros([steps, width], tl.float32)
        # Factors are loaded in the loop, from the cache: kept, they would take a quarter of the registers.
        b_f = _factor(p_scale, 0, i_s, i_head, factor, features, size, steps)
        b_grad_n, b_s0, b_o0 = _add_row(p_grad_0 + first, places, m_z, b_n, b_grad_n, b_f, b_s0, b_o0)
        b_f = _factor(p_scale, 1, i_s, i_head, factor, features, size, steps)
        b_grad_n, b_s1, b_o1 = _add_row(p_grad_1 + first, places, m_z, b_n, b_grad_n, b_f, b_s1, b_o1)
        if rows == 4:
            b_f = _factor(p_scale, 2, i_s, i_head, factor, features, size, steps)
            b_grad_n, b_s2, b_o2 = _add_row(p_grad_2 + first, places, m_z, b_n, b_grad_n, b_f, b_s2, b_o2)
            b_f = _factor(p_scale, 3, i_s, i_head, factor, features, size, steps)
            b_grad_n, b_s3, b_o3 = _add_row(p_grad_3 + first, places, m_z, b_n, b_grad_n, b_f, b_s3, b_o3)
        b_grad_z = (b_grad_n - b_n * (tl.sum(b_grad_n * b_n, 1) / size)[:, None]) * b_rstd
        z_places = _places(features, width, steps)
        tl.store(p_grad_z + z_first + z_places, b_grad_z.to(p_grad_z.dtype.element_ty), mask=m_z)
    part = i_part * rows * features + i_head * size
    _store_part(p_scale_parts, p_offset_parts, part, 0, i_s, b_s0, b_o0, factor, features, size)
    _store_part(p_scale_parts, p_offset_parts, part, 1, i_s, b_s1, b_o1, factor, features, size)
    if rows == 4:
        _store_part(p_scale_parts, p_offset_parts, part, 2, i_s, b_s2, b_o2, factor, features, size)
        _store_part(p_scale_parts, p_offset_parts, part, 3, i_s, b_s3, b_o3, factor, features, size)
