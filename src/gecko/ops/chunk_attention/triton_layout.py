# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Tokens of a call laid on the grid of chunks, or into the ring of the state, and turned by their place, in one pass.

Bytes: each number is read once and written once, whatever is done to it on the way. gecko-7b at T = 32 K in bf16: q, in
two turns, and k read 192 MiB and write 192 MiB, 0.08 ms at 4.8 TB/s; gecko-1b the half. Values are laid only where the
call does not cover whole chunks, or continues a document: else they are attended to where they lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.custom_op import custom_op
from gecko.ops.kernels import Launch, blocks, tile


@triton.jit(do_not_specialize=["rows", "length", "heads", "turned_heads"])
def _lay_kernel(
    p_x, p_ring, p_table, p_out, p_offset, p_shift, rows, length, heads, turned_heads, further: tl.constexpr,
    chunk_size: tl.constexpr, width: tl.constexpr, to_ring: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Row i of ``out`` takes the token that belongs there, turned by its place, or what the ring holds for it."""
    i_row = tl.program_id(1).to(tl.int64)
    i_out = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    i_d = tl.program_id(2) * block_d + tl.arange(0, block_d)
    offset = tl.load(p_offset + i_row // heads)
    i_token = i_out - offset
    if to_ring:
        i_token = length - 1 - (length - 1 - i_token + 2 * chunk_size) % (2 * chunk_size)
    m_d = (i_d < width)[None, :]
    m_out = (i_out < rows)[:, None] & m_d
    m_new = ((i_token >= 0) & (i_token < length))[:, None] & m_out
    b_x = tl.load(p_x + (i_row * length + i_token)[:, None] * width + i_d[None, :], mask=m_new, other=0.0)
    b_x = b_x.to(tl.float32)
    if p_table is not None:
        turned = i_row % heads < turned_heads
        b_x = _turn(b_x, turned, p_table, i_out % chunk_size + further, i_d, m_d, 1.0, width, block_t, block_d)
    if p_ring is not None:
        i_slot = i_out if to_ring else (i_out + tl.load(p_shift + i_row // heads)) % (2 * chunk_size)
        p_old = p_ring + (i_row * 2 * chunk_size + i_slot)[:, None] * width + i_d[None, :]
        b_x += tl.load(p_old, mask=(i_token < 0)[:, None] & m_out, other=0.0).to(tl.float32)
    p_to = p_out + (i_row * rows + i_out)[:, None] * width + i_d[None, :]
    tl.store(p_to, b_x.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["rows", "length", "heads", "turned_heads"])
def _lay_backward_kernel(
    p_grad, p_table, p_out, p_offset, rows, length, heads, turned_heads, further: tl.constexpr,
    chunk_size: tl.constexpr, width: tl.constexpr, to_ring: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """A token's gradient: that of the row it was laid on, turned back."""
    i_row = tl.program_id(1).to(tl.int64)
    i_token = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    i_d = tl.program_id(2) * block_d + tl.arange(0, block_d)
    m_d = (i_d < width)[None, :]
    i_from = i_token + tl.load(p_offset + i_row // heads)
    m_token = i_token < length
    m_laid = m_token
    if to_ring:
        i_from = i_from % (2 * chunk_size)
        m_laid = m_laid & (i_token >= length - 2 * chunk_size)
    p_from = p_grad + (i_row * rows + i_from)[:, None] * width + i_d[None, :]
    b_x = tl.load(p_from, mask=m_laid[:, None] & m_d, other=0.0).to(tl.float32)
    if p_table is not None:
        turned = i_row % heads < turned_heads
        b_x = _turn(b_x, turned, p_table, i_from % chunk_size + further, i_d, m_d, -1.0, width, block_t, block_d)
    p_to = p_out + (i_row * length + i_token)[:, None] * width + i_d[None, :]
    tl.store(p_to, b_x.to(p_out.dtype.element_ty), mask=m_token[:, None] & m_d)


@triton.jit
def _turn(
    b_x, turned, p_table, i_angle, i_d, m_d, sign, width: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr
):  # fmt: skip
    """The pairs (2j, 2j + 1) of ``b_x`` times cos + i · sign · sin, which the table holds in pairs as well."""
    if turned:
        b_turn = tl.load(p_table + i_angle[:, None] * width + i_d[None, :], mask=m_d, other=0.0)
        b_cos, b_sin = tl.split(tl.reshape(b_turn, (block_t, block_d // 2, 2)))
        b_even, b_odd = tl.split(tl.reshape(b_x, (block_t, block_d // 2, 2)))
        b_sin *= sign
        pairs = tl.join(b_even * b_cos - b_odd * b_sin, b_even * b_sin + b_odd * b_cos)
        b_x = tl.reshape(pairs, (block_t, block_d))
    return b_x


def rotary_table(chunk_size: int, width: int, base: float, device: torch.device) -> Tensor:
    """(2c, width) float32: cos and sin, in pairs, of the angles of places 0 … 2c − 1, formed in float64."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angles = torch.arange(2 * chunk_size, dtype=torch.float64, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1).float()


def _tiles(width: int) -> tuple[int, int]:
    """(rows, features) of a tile of 4,096 numbers: 32 for each thread of four warps."""
    features = min(tile(width), 256)
    return 4096 // features, features


def _lay(
    x: Tensor, ring: Tensor | None, table: Tensor | None, offset: Tensor, shift: Tensor, rows: int, to_ring: bool,
    chunk_size: int, turned_heads: int, further: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    batch, heads, length, width = x.shape
    out = x.new_empty(batch, heads, rows, width, dtype=dtype)
    block_t, block_d = _tiles(width)
    Launch(
        _lay_kernel, (blocks(rows, block_t), batch * heads, blocks(width, block_d)),
        dict(
            p_x=x.contiguous(), p_ring=None if ring is None else ring.contiguous(), p_table=table, p_out=out,
            p_offset=offset, p_shift=shift, rows=rows, length=length, heads=heads, turned_heads=turned_heads,
            further=further, chunk_size=chunk_size, width=width, to_ring=to_ring, block_t=block_t, block_d=block_d,
        ), warps=4,
    ).run()  # fmt: skip
    return out


def _lay_backward(
    grad: Tensor, table: Tensor | None, offset: Tensor, length: int, to_ring: bool,
    chunk_size: int, turned_heads: int, further: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    batch, heads, rows, width = grad.shape
    out = grad.new_empty(batch, heads, length, width, dtype=dtype)
    block_t, block_d = _tiles(width)
    Launch(
        _lay_backward_kernel, (blocks(length, block_t), batch * heads, blocks(width, block_d)),
        dict(
            p_grad=grad.contiguous(), p_table=table, p_out=out, p_offset=offset, rows=rows, length=length,
            heads=heads, turned_heads=turned_heads, further=further, chunk_size=chunk_size, width=width,
            to_ring=to_ring, block_t=block_t, block_d=block_d,
        ), warps=4,
    ).run()  # fmt: skip
    return out


def _ring_grad(grad: Tensor, offset: Tensor, shift: Tensor, length: int, to_ring: bool, chunk_size: int) -> Tensor:
    """(B, H, 2c, width): what the rows that were taken from the ring pass back to it."""
    slot = torch.arange(2 * chunk_size, device=grad.device)
    if to_ring:
        row, taken = slot.expand(len(offset), -1), (slot - offset[:, None]) % (2 * chunk_size) >= length
    else:
        row = (slot - shift[:, None]) % (2 * chunk_size)
        taken = row < offset[:, None]
    index = row.clamp(max=grad.shape[2] - 1)[:, None, :, None].expand(-1, grad.shape[1], -1, grad.shape[3])
    return grad.gather(2, index).masked_fill(~taken[:, None, :, None], 0)


@custom_op("lay")
def lay(
    x: Tensor, ring: Tensor | None, table: Tensor | None, offset: Tensor, shift: Tensor, rows: int, to_ring: bool,
    chunk_size: int, turned_heads: int, further: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x (B, H, T, d), the first ``turned_heads`` heads turned by place + ``further``, laid on ``rows`` rows.

    On the grid, token t of row b lies at offset_b + t; rows before it are the ring's slots (row + shift_b) mod 2c, and
    rows after its last token zero. In the ring (``to_ring``), at (offset_b + t) mod 2c, and a slot that no token takes
    keeps what it held. Without a ring, what it would give is zero.

    Args:
        ring: (B, H, 2c, d); table: (2c, d) of ``rotary_table``; None turns nothing. offset, shift: (B,) int64.

    Returns:
        (B, H, rows, d) of ``dtype``.
    """
    return _lay(x, ring, table, offset, shift, rows, to_ring, chunk_size, turned_heads, further, dtype)


@lay.register_fake
def _(x, ring, table, offset, shift, rows, to_ring, chunk_size, turned_heads, further, dtype):
    return x.new_empty(*x.shape[:2], rows, x.shape[3], dtype=dtype)


@custom_op("lay_backward")
def lay_backward(
    grad: Tensor, table: Tensor | None, offset: Tensor, length: int, to_ring: bool,
    chunk_size: int, turned_heads: int, further: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The gradient by x of ``lay``, (B, H, length, d) of ``dtype``."""
    return _lay_backward(grad, table, offset, length, to_ring, chunk_size, turned_heads, further, dtype)


@lay_backward.register_fake
def _(grad, table, offset, length, to_ring, chunk_size, turned_heads, further, dtype):
    return grad.new_empty(*grad.shape[:2], length, grad.shape[3], dtype=dtype)


def _keep(ctx, inputs, output):
    x, ring, table, offset, shift, _, to_ring, chunk_size, turned_heads, further, _ = inputs
    ctx.save_for_backward(table, offset, shift)
    ctx.length, ctx.dtype, ctx.ring_dtype = x.shape[2], x.dtype, None if ring is None else ring.dtype
    ctx.to_ring, ctx.chunk_size, ctx.turned = to_ring, chunk_size, (turned_heads, further)


def _pass_back(ctx, grad):
    table, offset, shift = ctx.saved_tensors
    grad_x = grad_ring = None
    if ctx.needs_input_grad[0]:
        grad_x = lay_backward(grad, table, offset, ctx.length, ctx.to_ring, ctx.chunk_size, *ctx.turned, ctx.dtype)
    if ctx.needs_input_grad[1]:
        grad_ring = _ring_grad(grad, offset, shift, ctx.length, ctx.to_ring, ctx.chunk_size).to(ctx.ring_dtype)
    return grad_x, grad_ring, *[None] * 9


lay.register_autograd(_pass_back, setup_context=_keep)
