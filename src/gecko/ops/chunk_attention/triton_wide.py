"""Attention for values that are too wide for a fused kernel: Triton computes the weights, cuBLAS the other products.

The normalised weights of a few chunks are written to a scratch buffer and multiplied with the values. Nothing of size
T · 2c · H is saved: the backward pass computes the weights again from the saved logarithm of their sum.

A query sees 1.5 c keys on average. cuBLAS's products divide the diagonal block into bands of rows, and each
band stops at the last key that it sees. With four bands they read 1.625 c of the 2 c keys of a window.

One layer of gecko-7b at T = 32 K, one row, bf16 takes 2.2 TFLOP forward (1.9 for the visible keys only) and 4.1
backward (3.9), and 1.2 GiB for inputs and outputs besides 1.6 GiB for the weights, written and read: at 790 TFLOP/s and
4.8 TB/s the products are the limit, so cuBLAS computes most of them. The log of the sums is all that is saved besides
inputs and output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, tile
from gecko.ops.chunk_attention.triton_layout import log_weights, operand, product_of_rows, query_tile
from gecko.ops.common import float32_product

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


_SCRATCH = 2**28
"""Bytes of weights in memory at a time. In 16 bits, backward keeps gradients and products besides: four times that."""

_LEAST_BAND = 256
"""Minimum rows per band. Products of fewer rows lose more efficiency than the skipped keys save."""

_Grads = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Gradients of near, far, k and v."""

_VARYING = ["chunks", "heads", "before"]


@triton.jit(do_not_specialize=_VARYING)
def _log_sum_kernel(
    p_near, p_far, p_k, p_first, p_out, chunks, heads, before, chunk_size: tl.constexpr, width: tl.constexpr,
    lookback: tl.constexpr, operand_type: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """Store log₂ Σ exp(score) over the keys that each query sees."""
    i_row = tl.program_id(1).to(tl.int64)
    i_chunk, i_place, i_query, b_first = query_tile(
        tl.program_id(0), p_first, i_row, chunks, heads, before, chunk_size, block_q
    )
    i_own = (i_row * (chunks + before) + i_chunk + before) * chunk_size
    first = tl.min(b_first, 0)
    b_top = tl.full((block_q,), -1e30, tl.float32)
    b_sum = tl.zeros((block_q,), tl.float32)
    i_grid = i_row * chunks * chunk_size + i_query
    if lookback:
        for begin in range((first + chunk_size) // block_k * block_k - chunk_size, 0, block_k):
            i_key = begin + tl.arange(0, block_k)
            m_key = (i_key >= first) & (i_key < 0)
            b_s = product_of_rows(
                p_far, i_grid, p_k, i_own + i_key, m_key, width, operand_type, block_q, block_k, block_d
            )
            b_top, b_sum = _add_weights(log_weights(b_s, i_key, i_place, b_first, m_key), b_top, b_sum)
    for begin in range(tl.maximum(first, 0) // block_k * block_k, tl.max(i_place, 0) + 1, block_k):
        i_key = begin + tl.arange(0, block_k)
        m_key = i_key < chunk_size
        b_s = product_of_rows(p_near, i_grid, p_k, i_own + i_key, m_key, width, operand_type, block_q, block_k, block_d)
        b_top, b_sum = _add_weights(log_weights(b_s, i_key, i_place, b_first, m_key), b_top, b_sum)
    tl.store(p_out + i_grid, b_top + tl.log2(b_sum))


@triton.jit
def _add_weights(b_s, b_top, b_sum):
    b_new = tl.maximum(b_top, tl.max(b_s, 1))
    return b_new, b_sum * tl.exp2(b_top - b_new) + tl.sum(tl.exp2(b_s - b_new[:, None]), 1)


@triton.jit
def _weights(
    p_near, p_far, p_k, p_first, p_log_sum, i_row, i_chunk, i_tile, chunks, heads, before, chunk_size: tl.constexpr,
    width: tl.constexpr, previous: tl.constexpr, operand_type: tl.constexpr, block_q: tl.constexpr,
    block_k: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Compute the weights of tile ``i_tile`` of a chunk's window. Return the places of its queries in the chunk and in
    the grid, its keys numbered from the start of the chunk, their mask, whether any is seen, and the weights."""
    of_queries: tl.constexpr = (chunk_size + block_q - 1) // block_q
    of_keys: tl.constexpr = (chunk_size + block_k - 1) // block_k
    _, i_place, i_query, b_first = query_tile(
        i_chunk * of_queries + i_tile % of_queries, p_first, i_row, chunks, heads, before, chunk_size, block_q
    )
    i_part = i_tile // of_queries
    i_key = i_part % of_keys * block_k + tl.arange(0, block_k)
    m_key = i_key < chunk_size
    if previous:
        i_key -= tl.where(i_part < of_keys, chunk_size, 0)
    seen = (tl.min(i_key, 0) <= tl.max(i_place, 0)) & (tl.max(i_key, 0) >= tl.min(b_first, 0))
    b_p = tl.zeros((block_q, block_k), tl.float32)
    if seen:
        i_near = i_row * chunks * chunk_size + i_query
        i_own = (i_row * (chunks + before) + i_chunk + before) * chunk_size
        p_q = p_near
        if previous:
            earlier = i_part < of_keys
            if earlier:
                p_q = p_far
        b_s = product_of_rows(p_q, i_near, p_k, i_own + i_key, m_key, width, operand_type, block_q, block_k, block_d)
        b_p = tl.exp2(log_weights(b_s, i_key, i_place, b_first, m_key) - tl.load(p_log_sum + i_near)[:, None])
    return i_place, i_query, i_key, m_key, seen, b_p


@triton.jit
def _store_weights(
    p_out, b_p, i_block, i_place, i_key, m_key, chunk_size: tl.constexpr, previous: tl.constexpr, band: tl.constexpr
):  # fmt: skip
    """Store weights to (blocks, c, window). Skip tiles to the right of their band, which no product reads."""
    window: tl.constexpr = 2 * chunk_size if previous else chunk_size
    if tl.min(i_key, 0) // band <= tl.max(i_place, 0) // band:
        p_rows = p_out + (i_block * chunk_size + i_place[:, None]) * window + i_key[None, :] + (window - chunk_size)
        tl.store(p_rows, b_p.to(p_out.dtype.element_ty), mask=m_key[None, :])


@triton.jit(do_not_specialize=[*_VARYING, "row", "chunk", "row_step", "chunk_step"])
def _weights_kernel(
    p_near, p_far, p_k, p_first, p_log_sum, p_weights, chunks, heads, before, row, chunk, row_step, chunk_step,
    chunk_size: tl.constexpr, width: tl.constexpr, previous: tl.constexpr, band: tl.constexpr,
    operand_type: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Store the normalised weights of a piece."""
    i_block = tl.program_id(1).to(tl.int64)
    i_row, i_chunk = row + i_block * row_step, chunk + i_block * chunk_step
    i_place, _, i_key, m_key, _, b_p = _weights(
        p_near, p_far, p_k, p_first, p_log_sum, i_row, i_chunk, tl.program_id(0), chunks, heads, before,
        chunk_size, width, previous, operand_type, block_q, block_k, block_d,
    )  # fmt: skip
    _store_weights(p_weights, b_p, i_block, i_place, i_key, m_key, chunk_size, previous, band)


@triton.jit(do_not_specialize=[*_VARYING, "row", "chunk", "row_step", "chunk_step"])
def _score_grads_kernel(
    p_near, p_far, p_k, p_first, p_log_sum, p_products, p_dot, p_weights, p_scores, chunks, heads, before, row, chunk,
    row_step, chunk_step, chunk_size: tl.constexpr, width: tl.constexpr, previous: tl.constexpr, band: tl.constexpr,
    operand_type: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Store the weights P of a piece and the gradients of its scores, P ⊙ (g vᵀ − Σ g ⊙ out), from ``p_products``, the
    products g vᵀ (blocks, c, window). Keys after the band of a query have none, and gradients that no product reads."""
    i_block = tl.program_id(1).to(tl.int64)
    i_row, i_chunk = row + i_block * row_step, chunk + i_block * chunk_step
    i_place, i_query, i_key, m_key, seen, b_p = _weights(
        p_near, p_far, p_k, p_first, p_log_sum, i_row, i_chunk, tl.program_id(0), chunks, heads, before,
        chunk_size, width, previous, operand_type, block_q, block_k, block_d,
    )  # fmt: skip
    b_ds = tl.zeros((block_q, block_k), tl.float32)
    if seen:
        window: tl.constexpr = 2 * chunk_size if previous else chunk_size
        i_product = (i_block * chunk_size + i_place[:, None]) * window + i_key[None, :] + (window - chunk_size)
        b_ds = tl.load(p_products + i_product, mask=m_key[None, :], other=0.0)
        b_ds = b_p * (b_ds - tl.load(p_dot + i_row * chunks * chunk_size + i_query)[:, None])
    _store_weights(p_weights, b_p, i_block, i_place, i_key, m_key, chunk_size, previous, band)
    _store_weights(p_scores, b_ds, i_block, i_place, i_key, m_key, chunk_size, previous, band)


@dataclass(frozen=True)
class _Shape:
    """Sizes of a call: R rows of n chunks, and ``before`` chunks of keys before them. Windows are one or two chunks."""

    rows: int
    heads: int
    chunks: int
    chunk: int
    before: int
    lookback: bool

    @classmethod
    def of(cls, near: Tensor, far: Tensor | None, k: Tensor, heads: int, chunk_size: int) -> _Shape:
        chunks = near.shape[1] // chunk_size
        before = k.shape[1] // chunk_size - chunks
        return cls(near.shape[0], heads, chunks, chunk_size, before, far is not None)

    def blocked(self, x: Tensor) -> Tensor:
        """Return x as (R, chunks, c, d)."""
        return x.unflatten(1, (-1, self.chunk))

    def bands(self) -> list[slice]:
        """Return the bands of rows of a chunk, one per product, large enough for efficient products."""
        return [slice(i, min(i + self.band, self.chunk)) for i in range(0, self.chunk, self.band)]

    @property
    def band(self) -> int:
        return max(_LEAST_BAND, self.chunk // 4)

    def pieces(self, itemsize: int) -> Iterator[_WidePiece]:
        """Yield groups of blocks whose weights fit in the buffer. Those without a previous chunk come first."""
        alone = 0 if self.lookback and self.before else 1 if self.lookback else self.chunks
        for begin, end, previous in ((0, alone, False), (alone, self.chunks, True)):
            # Blocks are the second axis of a grid, which is limited to 65,535.
            most = min(65_535, max(1, _SCRATCH // ((1 + previous) * self.chunk**2 * itemsize)))
            if end - begin > self.rows:
                for row, chunk in product(range(self.rows), range(begin, end, most)):
                    yield _WidePiece(row, chunk, min(most, end - chunk), False, previous)
            else:
                for chunk, row in product(range(begin, end), range(0, self.rows, most)):
                    yield _WidePiece(row, chunk, min(most, self.rows - row), True, previous)


@dataclass(frozen=True)
class _WidePiece:
    """``count`` blocks starting at (row, chunk): one chunk of consecutive rows (``across``), or chunks of one row."""

    row: int
    chunk: int
    count: int
    across: bool
    previous: bool

    def of(self, x: Tensor, shift: int = 0) -> Tensor:
        """Return the blocks (count, …) of x (R, chunks, …), with chunks moved by ``shift``."""
        chunk = self.chunk + shift
        if self.across:
            return x[self.row : self.row + self.count, chunk]
        return x[self.row, chunk : chunk + self.count]


def _tiles(width: int, dtype: torch.dtype, block_k: int) -> dict[str, int]:
    """Return the tiles of a product with ``block_k`` keys. They are smaller for 32 bits, which need three times the
    registers."""
    block_k, block_d = (block_k, 64) if dtype.itemsize == 2 else (32, 32)
    return dict(block_q=64, block_k=block_k, block_d=min(tile(width), block_d))


def _log_sums(near: Tensor, far: Tensor | None, k: Tensor, first: Tensor, shape: _Shape) -> Tensor:
    out = near.new_empty(near.shape[:2], dtype=torch.float32)
    tiles = _tiles(near.shape[2], k.dtype, 128)
    arguments = dict(
        p_near=near, p_far=far, p_k=k, p_first=first, p_out=out, chunks=shape.chunks, heads=shape.heads,
        before=shape.before, chunk_size=shape.chunk, width=near.shape[2], lookback=shape.lookback,
        operand_type=operand(k), **tiles,
    )  # fmt: skip
    grid = shape.chunks * blocks(shape.chunk, tiles["block_q"]), shape.rows
    Launch(_log_sum_kernel, grid, arguments, warps=4, stages=3).run()
    return out


def _piece_arguments(
    near: Tensor, far: Tensor | None, k: Tensor, first: Tensor, log_sum: Tensor, shape: _Shape, piece: _WidePiece,
    block_k: int,
) -> dict[str, Any]:  # fmt: skip
    return dict(
        p_near=near, p_far=far, p_k=k, p_first=first, p_log_sum=log_sum, chunks=shape.chunks, heads=shape.heads,
        before=shape.before, row=piece.row, chunk=piece.chunk, row_step=int(piece.across),
        chunk_step=int(not piece.across), chunk_size=shape.chunk, width=near.shape[2], previous=piece.previous,
        band=shape.band, operand_type=operand(k), **_tiles(near.shape[2], k.dtype, block_k),
    )  # fmt: skip


def _tiles_of(piece: _WidePiece, shape: _Shape, arguments: dict[str, Any]) -> tuple[int, int]:
    """Return the grid of a kernel that computes the weights of a piece."""
    queries, keys = (blocks(shape.chunk, arguments[name]) for name in ("block_q", "block_k"))
    return queries * keys * (1 + piece.previous), piece.count


def _scratch(like: Tensor, shape: _Shape, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a flat buffer for the attention weights of the largest piece; its dtype is ``dtype`` or ``like``'s."""
    pieces = shape.pieces(like.itemsize)
    return like.new_empty(max(x.count * (1 + x.previous) for x in pieces) * shape.chunk**2, dtype=dtype)


def _room(scratch: Tensor, piece: _WidePiece, chunk: int) -> Tensor:
    """Return the part of the buffer for a piece, (blocks, c, window)."""
    window = (1 + piece.previous) * chunk
    return scratch[: piece.count * chunk * window].view(piece.count, chunk, window)


def wide_forward(
    near: Tensor, far: Tensor | None, k: Tensor, v: Tensor, first: Tensor, heads: int, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Return outputs (R, n · c, value width) and log₂ of the sums (R, n · c). For inputs, see ``triton_layout``."""
    shape = _Shape.of(near, far, k, heads, chunk_size)
    log_sum = _log_sums(near, far, k, first, shape)
    out = v.new_empty(*near.shape[:2], v.shape[2])
    scratch = _scratch(v, shape)
    for piece in shape.pieces(v.itemsize):
        weights = _room(scratch, piece, chunk_size)
        arguments = _piece_arguments(near, far, k, first, log_sum, shape, piece, 128) | {"p_weights": weights}
        Launch(_weights_kernel, _tiles_of(piece, shape, arguments), arguments, warps=4, stages=3).run()
        values = piece.of(_windows(v, shape, piece), shape.before - piece.previous)
        outputs = piece.of(shape.blocked(out))
        for band in shape.bands():
            keys = weights.shape[2] - chunk_size + band.stop
            torch.bmm(weights[:, band, :keys], values[:, :keys], out=outputs[:, band])
    return out, log_sum


def _windows(v: Tensor, shape: _Shape, piece: _WidePiece) -> Tensor:
    """Return the windows of v, (R, windows, w, d). They are overlapping views if windows have two chunks."""
    rows, length, width = v.shape
    step = shape.chunk * width
    sizes = (rows, length // shape.chunk - piece.previous, (1 + piece.previous) * shape.chunk, width)
    return v.as_strided(sizes, (length * width, step, width, 1))


def wide_backward(
    grad: Tensor, near: Tensor, far: Tensor | None, k: Tensor, v: Tensor, first: Tensor, dot: Tensor, log_sum: Tensor,
    heads: int, chunk_size: int,
) -> _Grads:  # fmt: skip
    """Return the gradients of near, far, k and v; ``dot`` is the sum of P dP of each query."""
    shape = _Shape.of(near, far, k, heads, chunk_size)
    grads = _empty_grads(near, far, k, v, shape)
    scratch = [_scratch(v, shape, dtype) for dtype in (None, None, torch.float32)]
    for piece in shape.pieces(v.itemsize):
        p, ds, products = (_room(x, piece, chunk_size) for x in scratch)
        values = piece.of(_windows(v, shape, piece), shape.before - piece.previous)
        for band in shape.bands():
            keys = products.shape[2] - chunk_size + band.stop
            float32_product(piece.of(shape.blocked(grad))[:, band], values[:, :keys].mT, out=products[:, band, :keys])
        arguments = _piece_arguments(near, far, k, first, log_sum, shape, piece, 64) | dict(
            p_products=products, p_dot=dot, p_weights=p, p_scores=ds
        )
        Launch(_score_grads_kernel, _tiles_of(piece, shape, arguments), arguments, warps=4, stages=3).run()
        _own_chunk(p[:, :, -chunk_size:], ds[:, :, -chunk_size:], (grad, near, k), grads, piece, shape)
        if piece.previous:
            _previous_chunk(p[:, :, :chunk_size], ds[:, :, :chunk_size], (grad, far, k), grads, piece, shape)
    return grads


def _empty_grads(near: Tensor, far: Tensor | None, k: Tensor, v: Tensor, shape: _Shape) -> _Grads:
    """Allocate the gradients, with zeros where no product writes: far of a first chunk, keys and values before it."""
    grad_far = None if far is None else torch.empty_like(far)
    if grad_far is not None and not shape.before:
        grad_far[:, : shape.chunk] = 0
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    for x in (grad_k, grad_v):
        x[:, : shape.before * shape.chunk] = 0
    return torch.empty_like(near), grad_far, grad_k, grad_v


def _own_chunk(
    p: Tensor, ds: Tensor, given: tuple[Tensor, Tensor, Tensor], grads: _Grads, piece: _WidePiece, shape: _Shape
) -> None:  # fmt: skip
    """Compute gradients of attention within a chunk, from the weights p and score gradients ds (blocks, c, c)."""
    grad, near, grad_near = (piece.of(shape.blocked(x)) for x in (*given[:2], grads[0]))
    k, grad_k, grad_v = (piece.of(shape.blocked(x), shape.before) for x in (given[2], *grads[2:]))
    for band in shape.bands():
        below = slice(band.start, None)
        torch.bmm(p[:, below, band].mT, grad[:, below], out=grad_v[:, band])
        torch.bmm(ds[:, below, band].mT, near[:, below], out=grad_k[:, band])
        torch.bmm(ds[:, band, : band.stop], k[:, : band.stop], out=grad_near[:, band])


def _previous_chunk(
    p: Tensor, ds: Tensor, given: tuple[Tensor, Tensor | None, Tensor], grads: _Grads, piece: _WidePiece, shape: _Shape
) -> None:  # fmt: skip
    """Compute gradients of attention to the previous chunk. Those of keys and values are added to the stored ones."""
    assert given[1] is not None and grads[1] is not None, "windows reach back"
    grad, far, grad_far = (piece.of(shape.blocked(x)) for x in (given[0], given[1], grads[1]))
    k, grad_k, grad_v = (piece.of(shape.blocked(x), shape.before - 1) for x in (given[2], *grads[2:]))
    grad_v.baddbmm_(p.mT, grad)
    grad_k.baddbmm_(ds.mT, far)
    torch.bmm(ds, k, out=grad_far)
