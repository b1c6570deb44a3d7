"""Triton backend of group RMS norm and layer norm. Forward reads x once; backward reads x and the gradient of y once.

A program processes a few whole steps. Backward computes the statistics again instead of saving them. A backward program
loops over many steps and writes one row of the gradients of weight and bias.

Memory traffic per number of x in bfloat16: 2 bytes read and 2 written forward, 4 and 2 backward, which is the minimum.
For float32 x and bfloat16 y, as under autocast: 4 and 2, then 6 and 4. ``F.rms_norm`` has the same traffic if input and
output have one dtype. Under autocast its output is float32, and each linear layer that reads it converts it separately:
8 + 6 · readers bytes (26 after CEMA with three readers, 20 before the feed-forward), against 6 here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile, warps_of

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


PROGRAMS = 1024
"""Maximum programs of the backward kernel. Each writes a row of the weight gradient; a GPU runs hundreds at once."""


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, centered: bool, dtype: torch.dtype
) -> Tensor:
    """Compute the RMS norm, or layer norm if ``centered``, over each group of features of x (…, D), as ``dtype``."""
    y: Tensor = _group_norm(x, weight, bias, groups, eps, centered, dtype)
    return y


def _sizes(features: int, groups: int) -> dict[str, int]:
    size = features // groups
    width, together = tile(size, 1), tile(groups, 1)
    steps = max(1, 4096 // (width * together))
    return {"features": features, "groups": groups, "size": size, "width": width, "together": together, "steps": steps}


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, centered: bool, dtype: torch.dtype
) -> Tensor:
    rows, sizes = x.numel() // x.shape[-1], _sizes(x.shape[-1], groups)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    Launch(_normalise, (blocks(rows, sizes["steps"]),), {
        "p_x": x.contiguous(), "p_weight": weight, "p_bias": bias, "p_y": y, "rows": rows, "eps": eps,
        "centered": centered, **sizes,
    }, warps_of(sizes)).run()  # fmt: skip
    return y


def _backward(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, groups: int, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    rows, sizes = x.numel() // x.shape[-1], _sizes(x.shape[-1], groups)
    sizes["steps"] = max(1, sizes["steps"] // 2)  # a thread also keeps its sums for scale and shift in registers
    programs = min(PROGRAMS, blocks(rows, sizes["steps"]))
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts = x.new_empty(2, programs, x.shape[-1], dtype=torch.float32)
    Launch(_gradients, (programs,), {
        "p_x": x.contiguous(), "p_weight": weight, "p_grad_y": grad_y.contiguous(), "p_grad_x": grad_x,
        "p_scale_parts": parts[0], "p_shift_parts": parts[1], "rows": rows, "programs": programs, "eps": eps,
        "centered": centered, **sizes,
    }, min(16, 2 * warps_of(sizes))).run()  # fmt: skip
    return grad_x, parts[0].sum(0), parts[1].sum(0)


_group_norm = custom_op("group_norm")(_forward)
_group_norm_backward = custom_op("group_norm_backward")(_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.fixed, _ = inputs
    ctx.save_for_backward(x, weight, bias)


def _propagate(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    grad_x, scale, shift = _group_norm_backward(grad_y, x, weight, *ctx.fixed)
    grad_weight = None if weight is None else scale.to(weight.dtype)
    grad_bias = None if bias is None else shift.to(bias.dtype)
    return grad_x, grad_weight, grad_bias, None, None, None, None


_group_norm.register_autograd(_propagate, setup_context=_keep)


@triton.jit
def _centered(b_x, m_x, size: tl.constexpr):
    """Return x (steps, groups, features) minus the mean of each group."""
    return tl.where(m_x, b_x - (tl.sum(b_x, 2) / size)[:, :, None], 0.0)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit(do_not_specialize=["rows"])
def _normalise(p_x, p_weight, p_bias, p_y, rows, eps, centered: tl.constexpr, features: tl.constexpr,
               groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr, together: tl.constexpr,
               steps: tl.constexpr):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64) * steps + tl.arange(0, steps)
    i_group, i_feature = tl.arange(0, together), tl.arange(0, width)
    i_column = i_group[:, None] * size + i_feature[None]
    m_column = (i_group < groups)[:, None] & (i_feature < size)[None]
    m_x = (i_row < rows)[:, None, None] & m_column[None]
    offsets = (i_row * features)[:, None, None] + i_column[None]
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    if centered:
        b_x = _centered(b_x, m_x, size)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 2) / size + eps)[:, :, None]
    if p_weight is not None:
        b_y *= 1 + tl.load(p_weight + i_column, mask=m_column, other=0.0).to(tl.float32)[None]
    if p_bias is not None:
        b_y += tl.load(p_bias + i_column, mask=m_column, other=0.0).to(tl.float32)[None]
    tl.store(p_y + offsets, b_y.to(p_y.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["rows", "programs"])
def _gradients(p_x, p_weight, p_grad_y, p_grad_x, p_scale_parts, p_shift_parts, rows, programs, eps,
               centered: tl.constexpr, features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr,
               width: tl.constexpr, together: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Store the gradient of x, and in one row of p_…_parts (programs, D) this program's sums for scale and shift."""
    program = tl.program_id(0).to(tl.int64)
    i_group, i_feature = tl.arange(0, together), tl.arange(0, width)
    i_column = i_group[:, None] * size + i_feature[None]
    m_column = (i_group < groups)[:, None] & (i_feature < size)[None]
    # Warps meet at each reduction: sums that are needed together are one, and that over steps is after the loop.
    b_scale_part = tl.zeros([steps, together, width], tl.float32)
    b_shift_part = tl.zeros([steps, together, width], tl.float32)
    b_weight = 1.0
    if p_weight is not None:
        i_weight = tl.zeros([steps, 1, 1], tl.int32) + i_column[None]
        m_weight = tl.broadcast_to(m_column[None], [steps, together, width])
        b_weight = 1 + tl.load(p_weight + i_weight, mask=m_weight, other=0.0).to(tl.float32)
    for first in tl.range(program * steps, rows, programs * steps, num_stages=3):
        i_row = first + tl.arange(0, steps)
        m_x = (i_row < rows)[:, None, None] & m_column[None]
        offsets = (i_row * features)[:, None, None] + i_column[None]
        b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
        b_grad = tl.load(p_grad_y + offsets, mask=m_x, other=0.0).to(tl.float32)
        b_shift_part += b_grad
        b_weighted = b_grad * b_weight
        if centered:
            b_x = _centered(b_x, m_x, size)
            b_squares, b_sum, b_dot = tl.reduce((b_x * b_x, b_weighted, b_weighted * b_x), 2, _add3)
        else:
            b_squares, b_dot = tl.reduce((b_x * b_x, b_weighted * b_x), 2, _add2)
        b_rstd = tl.rsqrt(b_squares / size + eps)
        b_y = b_x * b_rstd[:, :, None]
        b_scale_part += b_grad * b_y
        b_grad_x = b_weighted - b_y * (b_dot * b_rstd / size)[:, :, None]
        if centered:
            b_grad_x -= (b_sum / size)[:, :, None]
        tl.store(p_grad_x + offsets, (b_grad_x * b_rstd[:, :, None]).to(p_grad_x.dtype.element_ty), mask=m_x)
    tl.store(p_scale_parts + program * features + i_column, tl.sum(b_scale_part, 0), mask=m_column)
    tl.store(p_shift_parts + program * features + i_column, tl.sum(b_shift_part, 0), mask=m_column)
