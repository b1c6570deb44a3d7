"""Compute the chain of memory updates M_{s+1} = A_s M_s + ρ_s ⊙ B_s in one kernel.

A program loops over the chunks for one tile of value features; the tiles are independent. Arithmetic is float32, with
three tf32 products per product on tensor cores ("tf32x3"). A product per step would need a launch, and a read and a
write of the memory in HBM, for each chunk.

Cost for gecko-7b at T = 32 K, one row, one layer: 17 GFLOP (three times that in tf32: 0.1 ms at 495 TFLOP/s); reading
B (128 MiB) and writing the memories (64 MiB in bf16): 0.04 ms at 4.8 TB/s. Every tile reads A (16 MiB) from the L2
cache. gecko-1b: half of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile
from gecko.ops.common import float32_product

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


_FORWARD, _BACKWARD = {"block_r": 256, "block_s": 16}, {"block_r": 128, "block_s": 32}
"""Rows of the memory per product, and key features that a product sums over at a time. On an H200 the first is 11 %
faster; backward it does not fit the registers of sm_80."""


@triton.jit(do_not_specialize=["steps", "reads"])
def _chain_kernel(
    p_a, p_first, p_b, p_rho, p_initial, p_memories, p_even, p_odd, steps, reads, key_width: tl.constexpr,
    value_width: tl.constexpr, block_r: tl.constexpr, block_s: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Run the chain for one tile of columns. Two buffers hold the current memory in turn: M_s is in ``p_even`` for odd
    s. Each program uses its own columns of the buffers."""
    size: tl.constexpr = key_width * value_width
    i_row = tl.program_id(1).to(tl.int64)
    i_v = tl.program_id(0) * block_v + tl.arange(0, block_v)
    p_from, p_to, p_then = p_initial + i_row * size, p_even + i_row * size, p_odd + i_row * size
    for s in range(0, steps):
        p_term = p_b + (i_row * reads + s - 1) * size
        if s == 0:
            p_term = p_first + i_row * size
        for begin in range(0, key_width, block_r):
            i_r, i_m, m_m = _columns(begin, i_v, key_width, value_width, block_r)
            b_rho = tl.load(p_rho + (i_row * steps + s) * key_width + i_r, mask=i_r < key_width, other=0.0)
            b_m = tl.load(p_term + i_m, mask=m_m, other=0.0) * b_rho[:, None]
            p_rows = p_a + (i_row * steps + s) * key_width * key_width + i_r[:, None] * key_width
            for inner in range(0, key_width, block_s):
                i_s, i_slice, m_slice = _columns(inner, i_v, key_width, value_width, block_s)
                m_a = (i_r < key_width)[:, None] & (i_s < key_width)[None, :]
                b_a = tl.load(p_rows + i_s[None, :], mask=m_a, other=0.0)
                b_slice = tl.load(p_from + i_slice, mask=m_slice, other=0.0)
                b_m = tl.dot(b_a, b_slice, b_m, input_precision="tf32x3")
            tl.store(p_to + i_m, b_m, mask=m_m)
            p_memory = p_memories + (i_row * reads + s + 1) * size + i_m
            tl.store(p_memory, b_m.to(p_memories.dtype.element_ty), mask=m_m & (s + 1 < reads))
        tl.debug_barrier()
        p_from, p_to, p_then = p_to, p_then, p_to


@triton.jit
def _columns(begin, i_v, key_width: tl.constexpr, value_width: tl.constexpr, rows: tl.constexpr):
    """Return the rows of a memory from ``begin`` on, and the offsets and the mask of their columns ``i_v``."""
    i_d = begin + tl.arange(0, rows)
    m_d = (i_d < key_width)[:, None] & (i_v < value_width)[None, :]
    return i_d, i_d[:, None] * value_width + i_v[None, :], m_d


@triton.jit(do_not_specialize=["steps", "reads"])
def _chain_backward_kernel(
    p_a, p_first, p_b, p_rho, p_grad_memories, p_grad_last, p_totals, p_grad_first, p_grad_b, p_grad_rho, p_even,
    p_odd, steps, reads, key_width: tl.constexpr, value_width: tl.constexpr, block_r: tl.constexpr,
    block_s: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Run the chain backwards for one tile of columns. ``totals`` are the gradients of M_1 … M_steps."""
    size: tl.constexpr = key_width * value_width
    i_row = tl.program_id(1).to(tl.int64)
    i_v = tl.program_id(0) * block_v + tl.arange(0, block_v)
    p_from, p_to, p_then = p_grad_last + i_row * size, p_even + i_row * size, p_odd + i_row * size
    for back in range(0, steps):
        s = steps - 1 - back
        i_step = i_row * steps + s
        p_term, p_by_term = p_b + (i_row * reads + s - 1) * size, p_grad_b + (i_row * reads + s - 1) * size
        if s == 0:
            p_term, p_by_term = p_first + i_row * size, p_grad_first + i_row * size
        for begin in range(0, key_width, block_r):
            i_r, i_m, m_m = _columns(begin, i_v, key_width, value_width, block_r)
            b_g = tl.load(p_from + i_m, mask=m_m, other=0.0)
            tl.store(p_totals + i_step * size + i_m, b_g.to(p_totals.dtype.element_ty), mask=m_m)
            b_rho = tl.load(p_rho + i_step * key_width + i_r, mask=i_r < key_width, other=0.0)
            tl.store(p_by_term + i_m, b_g * b_rho[:, None], mask=m_m)
            b_part = tl.sum(b_g * tl.load(p_term + i_m, mask=m_m, other=0.0), 1)
            p_part = p_grad_rho + (i_step * tl.num_programs(0) + tl.program_id(0)) * key_width + i_r
            tl.store(p_part, b_part, mask=i_r < key_width)
            b_g = tl.load(p_grad_memories + (i_row * reads + s) * size + i_m, mask=m_m, other=0.0).to(tl.float32)
            p_columns = p_a + i_step * key_width * key_width + i_r[None, :]
            for inner in range(0, key_width, block_s):
                i_s, i_slice, m_slice = _columns(inner, i_v, key_width, value_width, block_s)
                m_a = (i_s < key_width)[:, None] & (i_r < key_width)[None, :]
                b_a = tl.load(p_columns + i_s[:, None] * key_width, mask=m_a, other=0.0)
                b_slice = tl.load(p_from + i_slice, mask=m_slice, other=0.0)
                b_g = tl.dot(tl.trans(b_a), b_slice, b_g, input_precision="tf32x3")
            tl.store(p_to + i_m, b_g, mask=m_m)
        tl.debug_barrier()
        p_from, p_to, p_then = p_to, p_then, p_to


def _common(a: Tensor, b: Tensor, tiles: dict[str, int]) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return grid and arguments. Columns are as many as still give every SM of a large GPU a program."""
    rows, reads, keys, values = b.shape
    block_v = 64 if rows * values >= 64 * 128 else 32
    limits = {name: min(size, tile(keys)) for name, size in tiles.items()}
    arguments = dict(steps=a.shape[1], reads=reads, key_width=keys, value_width=values, block_v=block_v, **limits)
    return (blocks(values, block_v), rows), arguments


def chain_forward(
    a: Tensor, first: Tensor, b: Tensor, rho: Tensor, initial: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute M_{s+1} = A_s M_s + ρ_s ⊙ B_s for R rows, where B_0 is ``first`` and B_s, s ≥ 1, is ``b``[:, s − 1].

    Args:
        a: (R, steps, key, key); first: (R, key, value); b: (R, reads, key, value), reads = steps or steps + 1;
        rho: (R, steps, key); initial: M_0, (R, key, value). All float32.

    Returns:
        M_0 … M_{reads − 1}, (R, reads, key, value) of ``dtype``, and M_steps, (R, key, value) float32.
    """
    memories, odd = torch.empty_like(b, dtype=dtype), torch.empty_like(initial)
    even = torch.empty_like(initial) if a.shape[1] else initial.clone()
    memories[:, 0] = initial
    grid, common = _common(a, b, _FORWARD)
    tensors = dict(
        p_a=a, p_first=first, p_b=b, p_rho=rho, p_initial=initial, p_memories=memories, p_even=even, p_odd=odd
    )  # fmt: skip
    Launch(_chain_kernel, grid, common | tensors, warps=8, stages=3).run()
    return memories, _last(a, even, odd)


def _last(a: Tensor, even: Tensor, odd: Tensor) -> Tensor:
    """Return the buffer that the last step wrote to, or the first one if there were no steps."""
    return odd if a.shape[1] and a.shape[1] % 2 == 0 else even


def chain_backward_forms(
    grad_memories: Tensor | None, grad_last: Tensor | None, a: Tensor, first: Tensor, b: Tensor, rho: Tensor,
    memories: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a, first, b, rho and initial."""
    grad_memories = torch.zeros_like(memories) if grad_memories is None else grad_memories.contiguous()
    grad_last = torch.zeros_like(first) if grad_last is None else grad_last.contiguous()
    (_, steps), (keys, values) = a.shape[:2], b.shape[2:]
    if steps < b.shape[1]:
        grad_last = grad_last + grad_memories[:, steps]
    totals = memories.new_empty(a.shape[0], steps, keys, values)
    grad_first, grad_b, even, odd = (torch.empty_like(x) for x in (first, b, first, first))
    if not steps:
        grad_first, even = torch.zeros_like(first), grad_last.clone()
    grad_b[:, max(steps - 1, 0) :] = 0
    grid, common = _common(a, b, _BACKWARD)
    grad_rho = rho.new_empty(*rho.shape[:2], grid[0], keys)
    tensors = dict(
        p_a=a, p_first=first, p_b=b, p_rho=rho, p_grad_memories=grad_memories, p_grad_last=grad_last, p_totals=totals,
        p_grad_first=grad_first, p_grad_b=grad_b, p_grad_rho=grad_rho, p_even=even, p_odd=odd,
    )  # fmt: skip
    Launch(_chain_backward_kernel, grid, common | tensors, warps=8, stages=2).run()
    grad_a = float32_product(totals.flatten(0, 1), memories[:, :steps].flatten(0, 1).mT).view_as(a)
    return grad_a, grad_first, grad_b, grad_rho.sum(2), _last(a, even, odd)


chain = custom_op("memory_chain")(chain_forward)
chain_backward = custom_op("memory_chain_backward")(chain_backward_forms)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4], output[0])
    ctx.set_materialize_grads(False)


def _pass_back(ctx, grad_memories, grad_last):
    return *chain_backward(grad_memories, grad_last, *ctx.saved_tensors), None


chain.register_autograd(_pass_back, setup_context=_keep)
