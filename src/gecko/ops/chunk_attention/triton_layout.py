"""Grid of chunks for the attention kernels: placing tokens on it, its tiles, and the weights between tiles.

Queries are (R, n · c, d) with R = batch · heads; keys and values are (R, (n + before) · c, d). Chunk u of the queries
is chunk u + before of the keys. It sees that chunk and, with lookback, the previous one. ``near`` are queries rotated
by their place in the chunk, for keys of the same chunk; ``far`` are rotated by c more, for keys of the previous chunk.
``first`` (B, n · c) int32 is the first key that a query sees, counted from the start of the grid of keys. The last key
is its own, so each query sees at least itself.

``lay`` copies the tokens of a call to the grid, or into the ring of the state, and rotates them, in one pass: each
number is read once and written once. Values are copied only if the call does not cover whole chunks or continues a
document; otherwise attention reads them in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile
from gecko.runtime.tensors import to_device

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product_of_rows(
    p_x, i_x, p_y, i_y, m_y, width: tl.constexpr, operand_type: tl.constexpr, block_x: tl.constexpr,
    block_y: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Return x yᵀ (block_x, block_y) for rows of two matrices with ``width`` columns."""
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
    """Load (rows, block_d) from a matrix with ``width`` columns, as operand of a product."""
    i_d = tl.arange(0, block_d)
    p_rows = p_x + i_row[:, None] * width + i_d[None, :]
    return tl.load(p_rows, mask=m_row[:, None] & (i_d < width)[None, :], other=0.0).to(operand_type)


@triton.jit
def log_weights(b_s, i_key, i_last, b_first, m_key):
    """Return log₂ of the unnormalised weights: −∞ if the query does not see the key. Keys are numbered from the start
    of the query's chunk."""
    seen = (i_key[None, :] >= b_first[:, None]) & (i_key[None, :] <= i_last[:, None]) & m_key[None, :]
    return tl.where(seen, b_s * LOG2_E, float("-inf"))


@triton.jit
def log_weights_by_key(b_s, i_key, i_last, b_first, m_key):
    """Return ``log_weights`` for scores (keys, queries)."""
    seen = (i_key[:, None] >= b_first[None, :]) & (i_key[:, None] <= i_last[None, :]) & m_key[:, None]
    return tl.where(seen, b_s * LOG2_E, float("-inf"))


@triton.jit
def query_tile(i_tile, p_first, i_row, chunks, heads, before, chunk_size: tl.constexpr, block_q: tl.constexpr):
    """Return the chunk of tile ``i_tile``, and for its queries the places in the chunk and the grid and the first keys.

    First keys are counted from the start of the chunk. A tile beyond the end of its chunk repeats the last place.
    """
    tiles: tl.constexpr = (chunk_size + block_q - 1) // block_q
    i_chunk = (i_tile // tiles).to(tl.int64)
    i_place = tl.minimum(i_tile % tiles * block_q + tl.arange(0, block_q), chunk_size - 1)
    i_query = i_chunk * chunk_size + i_place
    b_first = tl.load(p_first + i_row // heads * chunks * chunk_size + i_query) - (i_chunk + before) * chunk_size
    return i_chunk, i_place, i_query, b_first.to(tl.int32)


def operand(x: Tensor) -> Any:
    """Return the Triton dtype of operands loaded from x: that of x, but float32 in the interpreter, which has no
    bfloat16 arithmetic."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype]


Grads = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Gradients of near, far, k and v."""


class Laid(NamedTuple):
    """Queries, keys and values on the grid, ``heads`` of a row of the batch after each other."""

    near: Tensor
    far: Tensor | None
    k: Tensor
    v: Tensor
    first: Tensor
    heads: int
    chunk: int
    """Tokens of a chunk."""

    @property
    def chunks(self) -> int:
        return self.near.shape[1] // self.chunk

    @property
    def before(self) -> int:
        return self.k.shape[1] // self.chunk - self.chunks

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of all kernels of attention."""
        return dict(
            p_near=self.near, p_far=self.far, p_k=self.k, p_first=self.first, chunks=self.chunks, heads=self.heads,
            before=self.before, chunk_size=self.chunk, width=self.near.shape[2], operand_type=operand(self.v),
        )  # fmt: skip

    def empty_grads(self) -> Grads:
        far = None if self.far is None else torch.empty_like(self.far)
        return torch.empty_like(self.near), far, torch.empty_like(self.k), torch.empty_like(self.v)


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
    """Return Σ_d x y over the last dimension in float32, for contiguous x and y of one shape."""
    out = x.new_empty(x.shape[:-1], dtype=torch.float32)
    block_d = min(tile(x.shape[-1]), 256)
    block_t = 4096 // block_d
    arguments = dict(p_x=x, p_y=y, p_out=out, rows=out.numel(), width=x.shape[-1], block_t=block_t, block_d=block_d)
    Launch(_row_dot_kernel, (blocks(out.numel(), block_t),), arguments, warps=4).run()
    return out


@triton.jit(do_not_specialize=["rows", "length", "heads", "turned_heads", "skipped"])
def _lay_kernel(
    p_x, p_queries, p_ring, p_table, p_out, p_near, p_far, p_offset, p_shift, rows, length, heads, turned_heads,
    skipped, chunk_size: tl.constexpr, width: tl.constexpr, to_ring: tl.constexpr, block_t: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """Store to each row of ``out`` its token, rotated by its place in the chunk, or else its slot of the ring. Every
    second program stores queries to ``near``, and rotated by a chunk more to ``far``."""
    i_row = tl.program_id(1).to(tl.int64)
    i_out = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    i_d = tl.program_id(2) // (1 if p_queries is None else 2) * block_d + tl.arange(0, block_d)
    queries, begin = False, 0
    if p_queries is not None:
        queries = tl.program_id(2) % 2 == 1
        begin = tl.where(queries, skipped, 0)
        if queries:
            p_x, p_out = p_queries, p_near
    offset = tl.load(p_offset + i_row // heads)
    i_token = i_out - offset
    if to_ring:
        i_token = length - 1 - (length - 1 - i_token + 2 * chunk_size) % (2 * chunk_size)
    m_d = (i_d < width)[None, :]
    m_out = ((i_out >= begin) & (i_out < rows))[:, None] & m_d
    m_new = ((i_token >= 0) & (i_token < length))[:, None] & m_out
    b_x = tl.load(p_x + (i_row * length + i_token)[:, None] * width + i_d[None, :], mask=m_new, other=0.0)
    b_x, i_angle = b_x.to(tl.float32), i_out % chunk_size
    i_to = (i_row * (rows - begin) + i_out - begin)[:, None] * width + i_d[None, :]
    turned = i_row % heads < turned_heads
    if p_far is not None:  # noqa: SIM102  (decided by the compiler)
        if queries:
            b_far = b_x
            if p_table is not None:
                b_far = _turn(b_x, turned, p_table, i_angle + chunk_size, i_d, m_d, 1.0, width, block_t, block_d)
            tl.store(p_far + i_to, b_far.to(p_far.dtype.element_ty), mask=m_out)
    if p_table is not None:
        b_x = _turn(b_x, turned, p_table, i_angle, i_d, m_d, 1.0, width, block_t, block_d)
    if p_ring is not None:
        i_slot = i_out if to_ring else (i_out + tl.load(p_shift + i_row // heads)) % (2 * chunk_size)
        p_old = p_ring + (i_row * 2 * chunk_size + i_slot)[:, None] * width + i_d[None, :]
        m_old = ((i_token < 0) & (not queries))[:, None] & m_out
        b_x += tl.load(p_old, mask=m_old, other=0.0).to(tl.float32)
    tl.store(p_out + i_to, b_x.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["rows", "length", "heads", "turned_heads", "skipped"])
def _lay_backward_kernel(
    p_grad, p_grad_near, p_grad_far, p_table, p_out, p_by_queries, p_offset, rows, length, heads, turned_heads, skipped,
    chunk_size: tl.constexpr, width: tl.constexpr, to_ring: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Store the gradient of each token: that of its row on the grid, rotated back, and that of the row in ``far``."""
    i_row = tl.program_id(1).to(tl.int64)
    i_token = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    i_d = tl.program_id(2) // (1 if p_by_queries is None else 2) * block_d + tl.arange(0, block_d)
    queries, begin = False, 0
    if p_by_queries is not None:
        queries = tl.program_id(2) % 2 == 1
        begin = tl.where(queries, skipped, 0)
        if queries:
            p_grad, p_out = p_grad_near, p_by_queries
    m_d = (i_d < width)[None, :]
    i_from = i_token + tl.load(p_offset + i_row // heads) - begin
    m_token = i_token < length
    m_laid = m_token
    if to_ring:
        i_from = i_from % (2 * chunk_size)
        m_laid = m_laid & (i_token >= length - 2 * chunk_size)
    i_grad = (i_row * (rows - begin) + i_from)[:, None] * width + i_d[None, :]
    b_x = tl.load(p_grad + i_grad, mask=m_laid[:, None] & m_d, other=0.0).to(tl.float32)
    turned, i_angle = i_row % heads < turned_heads, i_from % chunk_size
    if p_table is not None:
        b_x = _turn(b_x, turned, p_table, i_angle, i_d, m_d, -1.0, width, block_t, block_d)
    if p_grad_far is not None:  # noqa: SIM102  (decided by the compiler)
        if queries:
            b_far = tl.load(p_grad_far + i_grad, mask=m_laid[:, None] & m_d, other=0.0).to(tl.float32)
            if p_table is not None:
                b_far = _turn(b_far, turned, p_table, i_angle + chunk_size, i_d, m_d, -1.0, width, block_t, block_d)
            b_x += b_far
    p_to = p_out + (i_row * length + i_token)[:, None] * width + i_d[None, :]
    tl.store(p_to, b_x.to(p_out.dtype.element_ty), mask=m_token[:, None] & m_d)


@triton.jit
def _turn(
    b_x, turned, p_table, i_angle, i_d, m_d, sign, width: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr
):  # fmt: skip
    """Return the pairs (2j, 2j + 1) of ``b_x`` times cos + i · sign · sin. The table holds pairs (cos, sin)."""
    if turned:
        b_turn = tl.load(p_table + i_angle[:, None] * width + i_d[None, :], mask=m_d, other=0.0)
        b_cos, b_sin = tl.split(tl.reshape(b_turn, (block_t, block_d // 2, 2)))
        b_even, b_odd = tl.split(tl.reshape(b_x, (block_t, block_d // 2, 2)))
        b_sin *= sign
        pairs = tl.join(b_even * b_cos - b_odd * b_sin, b_even * b_sin + b_odd * b_cos)
        b_x = tl.reshape(pairs, (block_t, block_d))
    return b_x


def rotary_table(chunk_size: int, frequencies: Tensor, device: torch.device) -> Tensor:
    """Return pairs (cos, sin) of the angles of positions 0 … 2c − 1, (2c, d) float32, computed in float64."""
    angles = torch.arange(2 * chunk_size, dtype=torch.float64, device=device)[:, None] * to_device(frequencies, device)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1).float()


def _tiles(width: int) -> tuple[int, int]:
    """Return (rows, features) of a tile of 2,048 numbers: 16 per thread of four warps. 32 spill on sm_80."""
    features = min(tile(width), 256)
    return 2048 // features, features


@custom_op("lay_backward")
def lay_backward(
    grad: Tensor, grad_near: Tensor | None, grad_far: Tensor | None, table: Tensor | None, offset: Tensor, length: int,
    to_ring: bool, chunk_size: int, turned_heads: int, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x in ``lay``, (B, H, length, d) of ``dtype``, and of the queries if there are any."""
    batch, heads, rows, width = grad.shape
    out = [grad.new_empty(batch, heads, length, width, dtype=dtype) for _ in range(1 + (grad_near is not None))]
    near, far = (None if x is None else x.contiguous() for x in (grad_near, grad_far))
    block_t, block_d = _tiles(width)
    if far is not None:  # two rotations of 16 numbers a thread would spill
        block_t = max(1, block_t // 2)
    arguments = dict(
        p_grad=grad.contiguous(), p_grad_near=near, p_grad_far=far, p_table=table, p_out=out[0],
        p_by_queries=None if near is None else out[1], p_offset=offset, rows=rows, length=length, heads=heads,
        turned_heads=turned_heads, skipped=0 if near is None else rows - near.shape[2], chunk_size=chunk_size,
        width=width, to_ring=to_ring, block_t=block_t, block_d=block_d,
    )  # fmt: skip
    grid = blocks(length, block_t), batch * heads, blocks(width, block_d) * len(out)
    Launch(_lay_backward_kernel, grid, arguments, warps=4).run()
    return out


def _ring_grad(grad: Tensor, offset: Tensor, shift: Tensor, length: int, to_ring: bool, chunk_size: int) -> Tensor:
    """Return the gradient of the ring, (B, H, 2c, width), from the rows that were copied from it."""
    slot = torch.arange(2 * chunk_size, device=grad.device)
    if to_ring:
        row, taken = slot.expand(len(offset), -1), (slot - offset[:, None]) % (2 * chunk_size) >= length
    else:
        row = (slot - shift[:, None]) % (2 * chunk_size)
        taken = row < offset[:, None]
    index = row.clamp(max=grad.shape[2] - 1)[:, None, :, None].expand(-1, grad.shape[1], -1, grad.shape[3])
    return grad.gather(2, index).masked_fill(~taken[:, None, :, None], 0)


def _keep(ctx, inputs, output):
    x, _, ring, table, offset, shift, _, to_ring, chunk_size, turned_heads, _, _, _ = inputs
    ctx.save_for_backward(table, offset, shift)
    ctx.length, ctx.dtype, ctx.ring_dtype = x.shape[2], x.dtype, None if ring is None else ring.dtype
    ctx.to_ring, ctx.chunk_size, ctx.turned_heads = to_ring, chunk_size, turned_heads


def _pass_back(ctx, grads):
    (table, offset, shift), by_queries = ctx.saved_tensors, (*grads[1:], None, None)
    grad_x = grad_queries = grad_ring = None
    if any(ctx.needs_input_grad[:2]):
        given = table, offset, ctx.length, ctx.to_ring, ctx.chunk_size, ctx.turned_heads, ctx.dtype
        grad_x, *rest = lay_backward(grads[0], *by_queries[:2], *given)
        grad_queries = rest[0] if rest else None
    if ctx.needs_input_grad[2]:
        grad_ring = _ring_grad(grads[0], offset, shift, ctx.length, ctx.to_ring, ctx.chunk_size).to(ctx.ring_dtype)
    return grad_x, grad_queries, grad_ring, *[None] * 10


@custom_op("lay")
def lay(
    x: Tensor, queries: Tensor | None, ring: Tensor | None, table: Tensor | None, offset: Tensor, shift: Tensor,
    rows: int, to_ring: bool, chunk_size: int, turned_heads: int, skipped: int, far: bool, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Copy x (B, H, T, d) to ``rows`` rows, and rotate the first ``turned_heads`` heads by place. Queries of the same
    shape and dtype are copied too, to the rows after the first ``skipped``; with ``far``, once more, rotated by
    place + c.

    On the grid, token t of batch row b goes to row offset_b + t. Row r of x before the first token gets slot
    (r + shift_b) mod 2c of the ring, and rows after the last token are zero. If ``to_ring``, the token goes to row
    (offset_b + t) mod 2c, and slots without a new token keep their value. Without a ring, its values are zero.

    Args:
        ring: (B, H, 2c, d); table: (2c, d) of ``rotary_table``; None: no rotation. offset, shift: (B,) int64.

    Returns:
        (B, H, rows, d) of ``dtype``; with queries, one or two of (B, H, rows − skipped, d).
    """
    batch, heads, length, width = x.shape
    out = [x.new_empty(batch, heads, rows, width, dtype=dtype)]
    if queries is not None:
        out += [x.new_empty(batch, heads, rows - skipped, width, dtype=dtype) for _ in range(1 + far)]
    block_t, block_d = _tiles(width)
    p_out, p_near, p_far = (*out, None, None)[:3]
    arguments = dict(
        p_x=x.contiguous(), p_queries=None if queries is None else queries.contiguous(),
        p_ring=None if ring is None else ring.contiguous(), p_table=table, p_out=p_out, p_near=p_near, p_far=p_far,
        p_offset=offset, p_shift=shift, rows=rows, length=length, heads=heads, turned_heads=turned_heads,
        skipped=skipped, chunk_size=chunk_size, width=width, to_ring=to_ring, block_t=block_t, block_d=block_d,
    )  # fmt: skip
    grid = blocks(rows, block_t), batch * heads, blocks(width, block_d) * (1 + (queries is not None))
    Launch(_lay_kernel, grid, arguments, warps=4).run()
    return out


lay.register_autograd(_pass_back, setup_context=_keep)
