"""The chain of memory updates M_{s+1} = A_s M_s + ρ_s ⊙ B_s in one kernel, and its factors A and ρ.

**Chain.** A program loops over the chunks for one tile of value features; the tiles are independent. Arithmetic is
float32 ("tf32x3"). A product per step would need a launch, and a read and a write of the memory, for each chunk.

**Factors** of the adaptive rule, from the summaries. Slot s holds the s-th chunk that enters the memory; slot 0 is the
previous chunk. N_0 is the normaliser before slot 0:

    ρ_s = sigmoid(w_s − N_s),   N_{s+1} = log(e^{N_s} + e^{w_s}),   A_s = (1 − ρ_s) I − ρ_s K_s.

If the slot resets, ρ_s = 1, N_{s+1} = w_s and A_s = 0. Backward; g_s is the gradient through ρ_s and A_s:

    g_s = ρ_s (dρ_s − row sums of (dA_s ⊙ K_s) − diagonal of dA_s),   dK_s = −ρ_s dA_s,
    dw_s = g_s + ρ_s (dN_{s+1} − g_s),   dN_s = (1 − ρ_s) (dN_{s+1} − g_s).
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


def _last(steps: int, even: Tensor, odd: Tensor) -> Tensor:
    """Return the buffer that the last step wrote to, or the first one if there were no steps."""
    return odd if steps and steps % 2 == 0 else even


@custom_op("memory_chain_backward")
def chain_backward(
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
    return grad_a, grad_first, grad_b, grad_rho.sum(2), _last(steps, even, odd)


@custom_op("memory_chain", chain_backward, range(5), lambda inputs, output: (*inputs[:4], output[0]), zeros=False)
def chain(
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
    return memories, _last(a.shape[1], even, odd)


_TILE = 4096
"""Elements of a matrix per program, 32 per thread; half as many backward, which keeps two matrices in registers."""

_NOTHING = tl.constexpr(-1e29)
"""Normalisers below this value are those of an empty set of tokens."""


@triton.jit
def _vector(p_first, p_rest, i_row, s, reads, size: tl.constexpr):
    """Return the pointer to slot s of a row. Slot 0 is in another tensor than the rest."""
    p_slot = p_rest + (i_row * reads + s - 1) * size
    if s == 0:
        p_slot = p_first + i_row * size
    return p_slot


@triton.jit
def _square(width: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr):
    """Return the matrix rows, matrix columns, offsets and mask of a program's tile."""
    i_r = tl.program_id(1) * block_r + tl.arange(0, block_r)
    i_c = tl.arange(0, block_c)
    m_k = (i_r < width)[:, None] & (i_c < width)[None, :]
    return i_r, i_c, i_r[:, None] * width + i_c[None, :], m_k


@triton.jit(do_not_specialize=["steps", "reads", "heads"])
def _factor_kernel(
    p_normaliser, p_first_weight, p_weights, p_first, p_keys, p_resets, p_rho, p_share, p_last, p_a, steps, reads,
    heads, width: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Store A and ρ of one slot, the share of w in N, and N after the last slot. ρ differs from the share only if both
    sets of tokens are empty. Each program follows N from slot 0 to its own, instead of waiting for another launch."""
    i_row, last = (tl.program_id(0) // steps).to(tl.int64), tl.program_id(0) % steps
    i_r, i_c, i_k, m_k = _square(width, block_r, block_c)
    m_r, p_resets = i_r < width, p_resets + i_row // heads * (reads + 1)
    b_n = tl.load(p_normaliser + i_row * width + i_r, mask=m_r, other=0.0)
    b_share, resets = tl.zeros_like(b_n), tl.load(p_resets) != 0
    for s in range(0, last + 1):
        b_w = tl.load(_vector(p_first_weight, p_weights, i_row, s, reads, width) + i_r, mask=m_r, other=0.0)
        resets = tl.load(p_resets + s) != 0
        b_most = tl.maximum(b_n, b_w)
        b_less = tl.exp(tl.minimum(b_n, b_w) - b_most)
        b_share = tl.where(resets, 1.0, tl.where(b_w > b_n, 1.0, b_less) / (1.0 + b_less))
        b_n = tl.where(resets, b_w, b_most + tl.log(1.0 + b_less))
    b_rho, i_step = tl.where(b_n < _NOTHING, 1.0, b_share), i_row * steps + last
    tl.store(p_share + i_step * width + i_r, b_share, mask=m_r)
    tl.store(p_rho + i_step * width + i_r, b_rho, mask=m_r)
    tl.store(p_last + i_row * width + i_r, b_n, mask=m_r & (last == steps - 1))
    b_k = tl.load(_vector(p_first, p_keys, i_row, last, reads, width * width) + i_k, mask=m_k, other=0.0)
    b_a = tl.where(i_r[:, None] == i_c[None, :], 1.0 - b_rho[:, None], 0.0) - b_rho[:, None] * b_k
    tl.store(p_a + i_step * width * width + i_k, tl.where(resets, 0.0, b_a), mask=m_k)


@triton.jit(do_not_specialize=["steps", "reads", "heads"])
def _factor_backward_kernel(
    p_first, p_keys, p_rho, p_share, p_resets, p_grad_a, p_grad_rho, p_grad_last, p_grad_normaliser,
    p_grad_first_weight, p_grad_weights, p_grad_first, p_grad_keys, steps, reads, heads, width: tl.constexpr,
    block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Store the gradients of some rows of every slot, from the last slot to the first."""
    i_row = tl.program_id(0).to(tl.int64)
    i_r, i_c, i_k, m_k = _square(width, block_r, block_c)
    m_r = i_r < width
    b_dn = tl.load(p_grad_last + i_row * width + i_r, mask=m_r, other=0.0)
    for back in range(0, steps):
        s = steps - 1 - back
        i_step = i_row * steps + s
        resets = tl.load(p_resets + i_row // heads * (reads + 1) + s) != 0
        b_k = tl.load(_vector(p_first, p_keys, i_row, s, reads, width * width) + i_k, mask=m_k, other=0.0)
        b_da = tl.load(p_grad_a + i_step * width * width + i_k, mask=m_k, other=0.0)
        b_da = tl.where(resets, 0.0, b_da)
        i_at = i_step * width + i_r
        b_rho = tl.load(p_rho + i_at, mask=m_r, other=0.0)
        p_to = _vector(p_grad_first, p_grad_keys, i_row, s, reads, width * width)
        tl.store(p_to + i_k, -b_rho[:, None] * b_da, mask=m_k)
        b_along = tl.sum(b_da * (b_k + tl.where(i_r[:, None] == i_c[None, :], 1.0, 0.0)), 1)
        b_g = b_rho * (tl.load(p_grad_rho + i_at, mask=m_r, other=0.0) - b_along)
        b_share = tl.load(p_share + i_at, mask=m_r, other=0.0)
        b_rest = b_dn - b_g
        p_to = _vector(p_grad_first_weight, p_grad_weights, i_row, s, reads, width)
        tl.store(p_to + i_r, b_g + b_share * b_rest, mask=m_r)
        b_dn = (1.0 - b_share) * b_rest
    tl.store(p_grad_normaliser + i_row * width + i_r, b_dn, mask=m_r)


def _over_matrices(kernel: Any, count: int, width: int, elements: int, **arguments: Any) -> None:
    """Launch a kernel over ``count`` square matrices, or rows of them, with about ``elements`` of one per program."""
    block_c = tile(width)
    block_r = max(1, min(block_c, elements // block_c))
    tiles = {"width": width, "block_r": block_r, "block_c": block_c}
    Launch(kernel, (count, blocks(width, block_r)), arguments | tiles, warps=4).run()


def _zeros_after(steps: int, x: Tensor) -> Tensor:
    """Allocate the gradient of x (R, reads, …), with zeros for the slots that do not enter."""
    room = torch.empty_like(x)
    room[:, max(steps - 1, 0) :].zero_()
    return room


@custom_op("memory_factors_backward")
def _factors_backward(
    grad_a: Tensor | None, grad_rho: Tensor | None, grad_last: Tensor | None, first_keys: Tensor, weights: Tensor,
    keys: Tensor, resets: Tensor, rho: Tensor, share: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the normaliser, of weight and keys of slot 0, and of weights and keys of the others."""
    rows, reads, width = weights.shape
    steps = rho.shape[1]
    grad_a = rho.new_zeros(rows, steps, width, width) if grad_a is None else grad_a
    grad_rho = torch.zeros_like(rho) if grad_rho is None else grad_rho
    grad_last = weights.new_zeros(rows, width) if grad_last is None else grad_last.contiguous()
    if not steps:
        by_weight, by_first_keys, by_weights, by_keys = map(torch.zeros_like, (grad_last, first_keys, weights, keys))
        return grad_last.clone(), by_weight, by_first_keys, by_weights, by_keys
    by_normaliser, by_weight, by_first_keys = (torch.empty_like(x) for x in (grad_last, grad_last, first_keys))
    by_weights, by_keys = _zeros_after(steps, weights), _zeros_after(steps, keys)
    _over_matrices(
        _factor_backward_kernel, rows, width, _TILE // 2, p_first=first_keys, p_keys=keys, p_rho=rho, p_share=share,
        p_resets=resets, p_grad_a=grad_a.contiguous(), p_grad_rho=grad_rho.contiguous(), p_grad_last=grad_last,
        p_grad_normaliser=by_normaliser, p_grad_first_weight=by_weight, p_grad_weights=by_weights,
        p_grad_first=by_first_keys, p_grad_keys=by_keys, steps=steps, reads=reads, heads=rows // len(resets),
    )  # fmt: skip
    return by_normaliser, by_weight, by_first_keys, by_weights, by_keys


def _saved_of_factors(inputs, output):
    return *inputs[2:6], output[1], output[3]


@custom_op("memory_factors", _factors_backward, of=range(5), saves=_saved_of_factors, results=3, zeros=False)
def factors(
    normaliser: Tensor, first_weight: Tensor, first_keys: Tensor, weights: Tensor, keys: Tensor, resets: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute A and ρ of the first ``steps`` slots, for R rows (batch rows × heads).

    Args:
        normaliser: N_0, (R, key); first_weight, first_keys: w_0 and K_0, (R, key) and (R, key, key).
        weights, keys: from slot 1 on, (R, reads, key) and (R, reads, key, key), reads ≥ steps − 1. All
            float32 and contiguous.
        resets: (B, reads + 1) bool, each row shared by R / B heads.

    Returns:
        A, (R, steps, key, key); ρ, (R, steps, key); N_steps, (R, key); the share of w in N, for the backward pass.
    """
    rows, reads, width = weights.shape
    rho, share = weights.new_empty(rows, steps, width), weights.new_empty(rows, steps, width)
    a, last = weights.new_empty(rows, steps, width, width), torch.empty_like(normaliser)
    if not steps:
        return a, rho, normaliser.clone(), share
    _over_matrices(
        _factor_kernel, rows * steps, width, _TILE, p_normaliser=normaliser, p_first_weight=first_weight,
        p_weights=weights, p_first=first_keys, p_keys=keys, p_resets=resets, p_rho=rho, p_share=share, p_last=last,
        p_a=a, steps=steps, reads=reads, heads=rows // len(resets),
    )  # fmt: skip
    return a, rho, last, share
