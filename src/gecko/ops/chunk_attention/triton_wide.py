"""Attention for values that are too wide for a fused kernel: Triton computes the weights, cuBLAS the other products.

The normalised weights of a few chunks are written to a scratch buffer and multiplied with the values. Nothing of size
T · 2c · H is saved: the backward pass computes the weights again from the saved logarithm of their sum.

A query sees 1.5 c keys on average. cuBLAS's products divide the diagonal block into bands of rows, and each
band stops at the last key that it sees. With four bands they read 1.625 c of the 2 c keys of a window.
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
from gecko.ops.chunk_attention.triton_layout import Grads, Laid, log_weights, product_of_rows, query_tile
from gecko.ops.common import float32_product

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


_SCRATCH = 2**28
"""Bytes of weights in memory at a time. In 16 bits, backward keeps gradients and products besides: four times that."""

_LEAST_BAND = 256
"""Minimum rows per band. Products of fewer rows lose more efficiency than the skipped keys save."""

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
class _Blocks:
    """``count`` blocks starting at (row, chunk): one chunk of consecutive rows (``across``), or chunks of one row."""

    row: int
    chunk: int
    count: int
    across: bool
    previous: bool
    """Whether the blocks see the chunk before theirs."""
    size: int
    """Tokens of a chunk."""

    @property
    def weights(self) -> int:
        return self.count * self.size**2 * (1 + self.previous)

    def room(self, scratch: Tensor) -> Tensor:
        """Return the part of a flat buffer for the weights, (count, c, window)."""
        return scratch[: self.weights].view(self.count, self.size, -1)

    def blocks(self, x: Tensor, shift: int = 0) -> Tensor:
        """Return the blocks (count, c, d) of x (R, chunks · c, d), with chunks moved by ``shift``."""
        return self._taken(x.unflatten(1, (-1, self.size)), shift)

    def windows(self, v: Tensor, before: int) -> Tensor:
        """Return the windows of v, (count, window, d). They are overlapping views if windows have two chunks."""
        rows, length, width = v.shape
        sizes = (rows, length // self.size - self.previous, (1 + self.previous) * self.size, width)
        return self._taken(v.as_strided(sizes, (length * width, self.size * width, width, 1)), before - self.previous)

    def _taken(self, x: Tensor, shift: int) -> Tensor:
        chunk = self.chunk + shift
        if self.across:
            return x[self.row : self.row + self.count, chunk]
        return x[self.row, chunk : chunk + self.count]


def _pieces(laid: Laid) -> Iterator[_Blocks]:
    """Yield groups of blocks whose weights fit in the buffer. Those without a previous chunk come first."""
    rows, lookback = len(laid.near), laid.far is not None
    alone = 0 if lookback and laid.before else 1 if lookback else laid.chunks
    for begin, end, previous in ((0, alone, False), (alone, laid.chunks, True)):
        # Blocks are the second axis of a grid, which is limited to 65,535.
        most = min(65_535, max(1, _SCRATCH // ((1 + previous) * laid.chunk**2 * laid.v.itemsize)))
        if end - begin > rows:
            for row, chunk in product(range(rows), range(begin, end, most)):
                yield _Blocks(row, chunk, min(most, end - chunk), False, previous, laid.chunk)
        else:
            for chunk, row in product(range(begin, end), range(0, rows, most)):
                yield _Blocks(row, chunk, min(most, rows - row), True, previous, laid.chunk)


def _scratch(laid: Laid, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a flat buffer for the attention weights of the largest piece; its dtype is ``dtype`` or that of v."""
    return laid.v.new_empty(max(piece.weights for piece in _pieces(laid)), dtype=dtype)


def _band(chunk: int) -> int:
    """Return the rows of a chunk in one product, enough for efficient products."""
    return max(_LEAST_BAND, chunk // 4)


def _bands(chunk: int) -> list[slice]:
    return [slice(i, min(i + _band(chunk), chunk)) for i in range(0, chunk, _band(chunk))]


def _tiles(laid: Laid, block_k: int) -> dict[str, int]:
    """Return the tiles of a product with ``block_k`` keys. They are smaller for 32 bits, which need three times the
    registers."""
    block_k, block_d = (block_k, 64) if laid.k.itemsize == 2 else (32, 32)
    return dict(block_q=64, block_k=block_k, block_d=min(tile(laid.near.shape[2]), block_d))


def _launch(kernel: Any, laid: Laid, piece: _Blocks, block_k: int, **tensors: Tensor) -> None:
    """Launch a kernel that computes the weights of a piece."""
    tiles = _tiles(laid, block_k)
    count = blocks(laid.chunk, tiles["block_q"]) * blocks(laid.chunk, tiles["block_k"]) * (1 + piece.previous)
    arguments = laid.arguments() | tiles | tensors | dict(
        row=piece.row, chunk=piece.chunk, row_step=int(piece.across), chunk_step=int(not piece.across),
        previous=piece.previous, band=_band(laid.chunk),
    )  # fmt: skip
    Launch(kernel, (count, piece.count), arguments, warps=4, stages=3).run()


def wide_forward(laid: Laid) -> tuple[Tensor, Tensor]:
    """Return outputs (R, n · c, value width) and log₂ of the sums (R, n · c)."""
    near, v, chunk, tiles = laid.near, laid.v, laid.chunk, _tiles(laid, 128)
    out, log_sum = v.new_empty(*near.shape[:2], v.shape[2]), near.new_empty(near.shape[:2], dtype=torch.float32)
    arguments = laid.arguments() | tiles | dict(p_out=log_sum, lookback=laid.far is not None)
    grid = laid.chunks * blocks(chunk, tiles["block_q"]), len(near)
    Launch(_log_sum_kernel, grid, arguments, warps=4, stages=3).run()
    scratch = _scratch(laid)
    for piece in _pieces(laid):
        weights = piece.room(scratch)
        _launch(_weights_kernel, laid, piece, 128, p_log_sum=log_sum, p_weights=weights)
        values, outputs = piece.windows(v, laid.before), piece.blocks(out)
        for band in _bands(chunk):
            keys = weights.shape[2] - chunk + band.stop
            torch.bmm(weights[:, band, :keys], values[:, :keys], out=outputs[:, band])
    return out, log_sum


def wide_backward(laid: Laid, grad: Tensor, dot: Tensor, log_sum: Tensor) -> Grads:
    """Return the gradients of near, far, k and v; ``dot`` is the sum of P dP of each query."""
    chunk, before, bands = laid.chunk, laid.before, _bands(laid.chunk)
    grad_near, grad_far, grad_k, grad_v = grads = laid.empty_grads()
    # No product writes far of a first chunk, and keys and values before it.
    if grad_far is not None and not before:
        grad_far[:, :chunk] = 0
    grad_k[:, : before * chunk], grad_v[:, : before * chunk] = 0, 0
    scratch = [_scratch(laid, dtype) for dtype in (None, None, torch.float32)]
    for piece in _pieces(laid):
        p, ds, products = map(piece.room, scratch)
        given, values = piece.blocks(grad), piece.windows(laid.v, before)
        for band in bands:
            keys = products.shape[2] - chunk + band.stop
            float32_product(given[:, band], values[:, :keys].mT, out=products[:, band, :keys])
        _launch(
            _score_grads_kernel, laid, piece, 64, p_log_sum=log_sum, p_products=products, p_dot=dot, p_weights=p,
            p_scores=ds,
        )  # fmt: skip
        own_p, own_ds = p[:, :, -chunk:], ds[:, :, -chunk:]
        near, by_near = piece.blocks(laid.near), piece.blocks(grad_near)
        k, by_k, by_v = (piece.blocks(x, before) for x in (laid.k, grad_k, grad_v))
        for band in bands:
            below = slice(band.start, None)
            torch.bmm(own_p[:, below, band].mT, given[:, below], out=by_v[:, band])
            torch.bmm(own_ds[:, below, band].mT, near[:, below], out=by_k[:, band])
            torch.bmm(own_ds[:, band, : band.stop], k[:, : band.stop], out=by_near[:, band])
        if piece.previous:  # gradients of keys and values are added to the stored ones
            assert laid.far is not None and grad_far is not None, "windows reach back"
            p, ds = p[:, :, :chunk], ds[:, :, :chunk]
            k, by_k, by_v = (piece.blocks(x, before - 1) for x in (laid.k, grad_k, grad_v))
            by_v.baddbmm_(p.mT, given)
            by_k.baddbmm_(ds.mT, piece.blocks(laid.far))
            torch.bmm(ds, k, out=piece.blocks(grad_far))
    return grads
