# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What the attention kernels share: tiles of queries and keys on the grid of chunks, and the weights between them.

The grid: queries (R, n · c, d) for R = batch · heads, keys and values (R, (n + before) · c, d). Chunk u of the queries
stands at chunk u + before of the keys, its own, and sees that and maybe the previous one. ``near`` are queries turned
by their place, for keys of their own chunk; ``far`` by c more, for the previous one. ``first`` (B, n · c) int32 is the
first key that a query sees, counted from the grid's first; the last is its own. So no query sees nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.kernels import Launch, blocks, tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product_of_rows(
    p_x, i_x, p_y, i_y, m_y, width: tl.constexpr, operand_type: tl.constexpr, block_x: tl.constexpr,
    block_y: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """x yᵀ (block_x, block_y) of rows of two matrices of ``width`` columns."""
    b_out = tl.zeros((block_x, block_y), tl.float32)
    for begin in range(0, width, block_d):
        i_d = begin + tl.arange(0, block_d)
        m_d = (i_d < width)[None, :]
        b_x = tl.load(p_x + i_x[:, None] * width + i_d[None, :], mask=m_d, other=0.0).to(operand_type)
        b_y = tl.load(p_y + i_y[:, None] * width + i_d[None, :], mask=m_y[:, None] & m_d, other=0.0).to(operand_type)
        b_out = tl.dot(b_x, tl.trans(b_y), b_out, input_precision="tf32x3")
    return b_out


@triton.jit
def load_rows(p_x, i_row, m_row, width: tl.constexpr, block_d: tl.constexpr, operand_type: tl.constexpr):
    """(rows, block_d) from a matrix of ``width`` columns, as operand of a product."""
    i_d = tl.arange(0, block_d)
    p_rows = p_x + i_row[:, None] * width + i_d[None, :]
    return tl.load(p_rows, mask=m_row[:, None] & (i_d < width)[None, :], other=0.0).to(operand_type)


@triton.jit
def log_weights(b_s, i_key, i_last, b_first, m_key):
    """log₂ of the weights but for their sum: scores where the query sees the key, else −∞. Keys by their distance
    from the start of the query's chunk."""
    seen = (i_key[None, :] >= b_first[:, None]) & (i_key[None, :] <= i_last[:, None]) & m_key[None, :]
    return tl.where(seen, b_s * LOG2_E, float("-inf"))


@triton.jit
def log_weights_by_key(b_s, i_key, i_last, b_first, m_key):
    """``log_weights`` of scores (keys, queries)."""
    seen = (i_key[:, None] >= b_first[None, :]) & (i_key[:, None] <= i_last[None, :]) & m_key[:, None]
    return tl.where(seen, b_s * LOG2_E, float("-inf"))


@triton.jit
def query_tile(i_tile, p_first, i_row, chunks, heads, before, chunk_size: tl.constexpr, block_q: tl.constexpr):
    """Tile ``i_tile`` of a row: its chunk, places in it, rows of the grid, and first keys from its own chunk's start.

    A tile does not reach over its chunk: what is too much repeats the last place.
    """
    tiles: tl.constexpr = (chunk_size + block_q - 1) // block_q
    i_chunk = (i_tile // tiles).to(tl.int64)
    i_place = tl.minimum(i_tile % tiles * block_q + tl.arange(0, block_q), chunk_size - 1)
    i_query = i_chunk * chunk_size + i_place
    b_first = tl.load(p_first + i_row // heads * chunks * chunk_size + i_query) - (i_chunk + before) * chunk_size
    return i_chunk, i_place, i_query, b_first.to(tl.int32)


def operand(x: Tensor) -> Any:
    """What tiles of x are multiplied as: what it is; the interpreter has no 16 bits of bfloat16."""
    if x.device.type == "cpu":
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype]


@triton.jit(do_not_specialize=["rows"])
def _row_dot_kernel(p_x, p_y, p_out, rows, width: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    m_t = i_t < rows
    b_sum = tl.zeros((block_t,), tl.float32)
    for begin in range(0, width, block_d):
        i_d = begin + tl.arange(0, block_d)
        i_x = i_t[:, None] * width + i_d[None, :]
        m_x = m_t[:, None] & (i_d < width)[None, :]
        b_x = tl.load(p_x + i_x, mask=m_x, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_x * tl.load(p_y + i_x, mask=m_x, other=0.0).to(tl.float32), 1)
    tl.store(p_out + i_t, b_sum, mask=m_t)


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Σ_d x y over the last dimension, float32; x and y contiguous, of one shape."""
    out = x.new_empty(x.shape[:-1], dtype=torch.float32)
    block_d = min(tile(x.shape[-1]), 256)
    block_t = 4096 // block_d
    Launch(
        _row_dot_kernel, (blocks(out.numel(), block_t),),
        dict(
            p_x=x, p_y=y, p_out=out, rows=out.numel(), width=x.shape[-1], block_t=block_t, block_d=block_d,
        ), warps=4,
    ).run()  # fmt: skip
    return out
