"""Triton backend of group RMS norm and layer norm. Forward reads x once; backward reads x and the gradient of y once.

A program processes a few whole steps. Backward computes the statistics again instead of saving them. A backward program
loops over many steps and writes one row of the gradients of weight and bias. The residual stream is the sum of x and of
outputs of linear layers, branches, which the same kernels add. ``F.rms_norm`` would return float32 under autocast,
which each reader converts separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile
from gecko.ops.common import contiguous

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


PROGRAMS = 1024
"""Maximum programs of the backward kernel. Each writes a row of the weight gradient; a GPU runs hundreds at once."""


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, centered: bool, dtype: torch.dtype
) -> Tensor:
    """Compute the RMS norm, or layer norm if ``centered``, over each group of features of x (…, D), as ``dtype``."""
    (y,) = _group_norm(x, None, None, weight, bias, groups, eps, centered, dtype, None)
    return y


def group_norm_of_sum(
    x: Tensor, branches: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, groups: int, eps: float,
    centered: bool, dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``group_norm`` of the sum of x and one or two branches, and the sum in the widest of their dtypes."""
    first, second = branches if len(branches) == 2 else (branches[0], None)
    widest = reduce(torch.promote_types, (branch.dtype for branch in branches), x.dtype)
    y, total = _group_norm(x, first, second, weight, bias, groups, eps, centered, dtype or widest, widest)
    return y, total


def _warps(sizes: dict[str, int]) -> int:
    """Return the number of warps for a tile: one per 512 numbers, between 4 and 16."""
    return min(16, max(4, sizes["steps"] * sizes["together"] * sizes["width"] // 512))


def _sizes(features: int, groups: int) -> dict[str, int]:
    size = features // groups
    width, together = tile(size, 1), tile(groups, 1)
    steps = max(1, 4096 // (width * together))
    return {"features": features, "groups": groups, "size": size, "width": width, "together": together, "steps": steps}


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, *others, groups, eps, centered, _, sum_dtype = inputs
    ctx.save_for_backward(x if sum_dtype is None else output[1], others[2])
    ctx.fixed, ctx.dtypes = (groups, eps, centered), [None if t is None else t.dtype for t in (x, *others)]
    ctx.set_materialize_grads(False)


def _propagate(ctx: Any, grads: list[Any]) -> tuple[Any, ...]:
    (x, weight), (grad_y, *grad_sum) = ctx.saved_tensors, grads
    affine: Any
    if all(grad is None for grad in grads):  # what follows stops gradients
        return (None,) * 10
    wanted = [t if needed else None for t, needed in zip(ctx.dtypes, ctx.needs_input_grad[:5], strict=True)]
    narrow = next((t for t in wanted[:3] if t not in (None, x.dtype)), None)
    if grad_y is None:  # only the sum was used
        affine, grads_x = (None, None), grad_sum
    else:
        found, *grads_x = _backward(grad_y, *(grad_sum or [None]), x, weight, *ctx.fixed, narrow)
        affine = (*found, None)[:2]
    of_terms = (None if t is None else grads_x[-1 if t == narrow else 0].to(t) for t in wanted[:3])
    of_affine = (None if t is None or of is None else of.to(t) for t, of in zip(wanted[3:], affine, strict=True))
    return *of_terms, *of_affine, *[None] * 5


@custom_op("group_norm")
def _group_norm(
    x: Tensor, first: Tensor | None, second: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int,
    eps: float, centered: bool, dtype: torch.dtype, sum_dtype: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """Return the norm of x; with ``sum_dtype`` that of the sum of x and branches, and the sum."""
    rows, sizes = x.numel() // x.shape[-1], _sizes(x.shape[-1], groups)
    outputs = _like(x, dtype, sum_dtype)
    Launch(_normalise, (blocks(rows, sizes["steps"]),), {
        **contiguous(p_x=x, p_first=first, p_second=second, p_weight=weight, p_bias=bias), "p_y": outputs[0],
        "p_sum": None if sum_dtype is None else outputs[1], "rows": rows, "eps": eps, "centered": centered, **sizes,
    }, _warps(sizes)).run()  # fmt: skip
    return outputs


_group_norm.register_autograd(_propagate, setup_context=_keep)


def _like(x: Tensor, *dtypes: torch.dtype | None) -> list[Tensor]:
    return [torch.empty_like(x, dtype=t, memory_format=torch.contiguous_format) for t in dtypes if t is not None]


@custom_op("group_norm_backward")
def _backward(
    grad_y: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, groups: int, eps: float,
    centered: bool, narrow: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of weight and, if ``centered``, bias (1 or 2, D), and that of x, which ``grad_sum`` is added
    to; with ``narrow`` once more in this dtype."""
    rows, sizes = x.numel() // x.shape[-1], _sizes(x.shape[-1], groups)
    sizes["steps"] = max(1, sizes["steps"] // 2)  # a thread also keeps its sums for scale and shift in registers
    alone = sizes["steps"] == 1 and not centered  # sums of one row fit in fewer warps, which wait less
    programs = min(PROGRAMS, blocks(rows, sizes["steps"]))
    grads = _like(x, x.dtype, narrow)
    parts = x.new_empty(1 + centered, programs, x.shape[-1], dtype=torch.float32)
    Launch(_gradients, (programs,), {
        **contiguous(p_x=x, p_weight=weight, p_grad_y=grad_y, p_grad_sum=grad_sum), "p_grad_x": grads[0],
        "p_grad_narrow": None if narrow is None else grads[1], "p_scale_parts": parts[0],
        "p_shift_parts": parts[1] if centered else None, "rows": rows, "programs": programs, "eps": eps,
        "centered": centered, **sizes,
    }, _warps(sizes) if alone else min(16, 2 * _warps(sizes)), registers=128).run()  # fmt: skip
    return [parts.sum(1), *grads]


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
def _normalise(p_x, p_first, p_second, p_sum, p_weight, p_bias, p_y, rows, eps, centered: tl.constexpr,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Store the norm of x, or of the sum of x and branches, and that sum."""
    i_row = tl.program_id(0).to(tl.int64) * steps + tl.arange(0, steps)
    i_group, i_feature = tl.arange(0, together), tl.arange(0, width)
    i_column = i_group[:, None] * size + i_feature[None]
    m_column = (i_group < groups)[:, None] & (i_feature < size)[None]
    m_x = (i_row < rows)[:, None, None] & m_column[None]
    offsets = (i_row * features)[:, None, None] + i_column[None]
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    if p_first is not None:
        b_x += tl.load(p_first + offsets, mask=m_x, other=0.0).to(tl.float32)
    if p_second is not None:
        b_x += tl.load(p_second + offsets, mask=m_x, other=0.0).to(tl.float32)
    if p_sum is not None:
        b_sum = b_x.to(p_sum.dtype.element_ty)
        tl.store(p_sum + offsets, b_sum, mask=m_x)
        b_x = b_sum.to(tl.float32)  # backward reads the rounded sum
    if centered:
        b_x = _centered(b_x, m_x, size)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 2) / size + eps)[:, :, None]
    if p_weight is not None:
        b_y *= 1 + tl.load(p_weight + i_column, mask=m_column, other=0.0).to(tl.float32)[None]
    if p_bias is not None:
        b_y += tl.load(p_bias + i_column, mask=m_column, other=0.0).to(tl.float32)[None]
    tl.store(p_y + offsets, b_y.to(p_y.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["rows", "programs"])
def _gradients(p_x, p_weight, p_grad_y, p_grad_sum, p_grad_x, p_grad_narrow, p_scale_parts, p_shift_parts, rows,
               programs, eps, centered: tl.constexpr, features: tl.constexpr, groups: tl.constexpr,
               size: tl.constexpr, width: tl.constexpr, together: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Store the gradient of x, which p_grad_sum is added to, and a copy in a narrow dtype; and in one row of
    p_…_parts (programs, D) this program's sums for scale and shift."""
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
    # Two more of wider rows, which may be float32, would not fit in shared memory.
    stages: tl.constexpr = 3 if steps * together * width <= 4096 else 1
    for first in tl.range(program * steps, rows, programs * steps, num_stages=stages):
        i_row = first + tl.arange(0, steps)
        m_x = (i_row < rows)[:, None, None] & m_column[None]
        offsets = (i_row * features)[:, None, None] + i_column[None]
        b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
        b_grad = tl.load(p_grad_y + offsets, mask=m_x, other=0.0).to(tl.float32)
        b_weighted = b_grad * b_weight
        if centered:
            b_shift_part += b_grad
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
        b_grad_x *= b_rstd[:, :, None]
        if p_grad_sum is not None:
            b_grad_x += tl.load(p_grad_sum + offsets, mask=m_x, other=0.0).to(tl.float32)
        tl.store(p_grad_x + offsets, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_x)
        if p_grad_narrow is not None:
            tl.store(p_grad_narrow + offsets, b_grad_x.to(p_grad_narrow.dtype.element_ty), mask=m_x)
    tl.store(p_scale_parts + program * features + i_column, tl.sum(b_scale_part, 0), mask=m_column)
    if centered:
        tl.store(p_shift_parts + program * features + i_column, tl.sum(b_shift_part, 0), mask=m_column)
