"""Attention for values that fit in a tile: one fused kernel forward, as in FlashAttention, and two backward.

FlexAttention with a block mask could do the same work, but it needs a mask per layout of documents, recompiles when
static sizes change, does not support queries with two rotations, and its backward pass cannot run without a GPU.

The forward pass reads q (twice), k and v, and writes out once; backward computes scores and g vᵀ once more, because
both kernels need them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, tile
from gecko.ops.chunk_attention.triton_layout import (
    Grads,
    Laid,
    load_rows,
    log_weights,
    log_weights_by_key,
    query_tile,
)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


WIDEST = 256
"""Maximum width of values for these kernels."""

_VARYING = ["chunks", "heads", "before"]


@triton.jit(do_not_specialize=_VARYING)
def _forward_kernel(
    p_near, p_far, p_k, p_v, p_first, p_out, p_log_sum, chunks, heads, before, chunk_size: tl.constexpr,
    width: tl.constexpr, value_width: tl.constexpr, lookback: tl.constexpr, operand_type: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a tile of queries, and log₂ Σ exp(score)."""
    i_row = tl.program_id(1).to(tl.int64)
    i_chunk, i_place, i_query, b_first = query_tile(
        tl.program_id(0), p_first, i_row, chunks, heads, before, chunk_size, block_q
    )
    m_all = i_place >= 0
    i_grid = i_row * chunks * chunk_size + i_query
    i_own = (i_row * (chunks + before) + i_chunk + before) * chunk_size
    first = tl.min(b_first, 0)
    b_top = tl.full((block_q,), -1e30, tl.float32)
    b_sum = tl.zeros((block_q,), tl.float32)
    b_out = tl.zeros((block_q, block_v), tl.float32)
    if lookback:
        b_q = load_rows(p_far, i_grid, m_all, width, block_d, operand_type)
        for begin in range((first + chunk_size) // block_k * block_k - chunk_size, 0, block_k):
            i_key = begin + tl.arange(0, block_k)
            m_key = (i_key >= first) & (i_key < 0)
            b_top, b_sum, b_out = _attend(
                b_q, p_k, p_v, i_own, i_key, m_key, i_place, b_first, b_top, b_sum, b_out,
                width, value_width, operand_type, block_d, block_v,
            )  # fmt: skip
    b_q = load_rows(p_near, i_grid, m_all, width, block_d, operand_type)
    for begin in range(tl.maximum(first, 0) // block_k * block_k, tl.max(i_place, 0) + 1, block_k):
        i_key = begin + tl.arange(0, block_k)
        b_top, b_sum, b_out = _attend(
            b_q, p_k, p_v, i_own, i_key, i_key < chunk_size, i_place, b_first, b_top, b_sum, b_out,
            width, value_width, operand_type, block_d, block_v,
        )  # fmt: skip
    i_v = tl.arange(0, block_v)
    p_to = p_out + i_grid[:, None] * value_width + i_v[None, :]
    tl.store(p_to, (b_out / b_sum[:, None]).to(p_out.dtype.element_ty), mask=(i_v < value_width)[None, :])
    tl.store(p_log_sum + i_grid, b_top + tl.log2(b_sum))


@triton.jit
def _attend(
    b_q, p_k, p_v, i_own, i_key, m_key, i_place, b_first, b_top, b_sum, b_out, width: tl.constexpr,
    value_width: tl.constexpr, operand_type: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the online softmax."""
    b_k = load_rows(p_k, i_own + i_key, m_key, width, block_d, operand_type)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
    b_s = log_weights(b_s, i_key, i_place, b_first, m_key)
    b_new = tl.maximum(b_top, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_new[:, None])
    b_scale = tl.exp2(b_top - b_new)
    b_v = load_rows(p_v, i_own + i_key, m_key, value_width, block_v, operand_type)
    b_out = tl.dot(b_p.to(operand_type), b_v, b_out * b_scale[:, None], input_precision="tf32x3")
    return b_new, b_sum * b_scale + tl.sum(b_p, 1), b_out


@triton.jit(do_not_specialize=_VARYING)
def _query_grads_kernel(
    p_near, p_far, p_k, p_v, p_first, p_log_sum, p_grad, p_dot, p_grad_near, p_grad_far, chunks, heads, before,
    chunk_size: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, lookback: tl.constexpr,
    operand_type: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr, block_d: tl.constexpr,
    block_v: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(1).to(tl.int64)
    i_chunk, i_place, i_query, b_first = query_tile(
        tl.program_id(0), p_first, i_row, chunks, heads, before, chunk_size, block_q
    )
    m_all = i_place >= 0
    i_grid = i_row * chunks * chunk_size + i_query
    i_own = (i_row * (chunks + before) + i_chunk + before) * chunk_size
    first = tl.min(b_first, 0)
    b_log_sum = tl.load(p_log_sum + i_grid)
    b_dot = tl.load(p_dot + i_grid)
    b_g = load_rows(p_grad, i_grid, m_all, value_width, block_v, operand_type)
    i_d = tl.arange(0, block_d)
    i_to = i_grid[:, None] * width + i_d[None, :]
    if lookback:
        b_q = load_rows(p_far, i_grid, m_all, width, block_d, operand_type)
        b_dq = tl.zeros((block_q, block_d), tl.float32)
        for begin in range((first + chunk_size) // block_k * block_k - chunk_size, 0, block_k):
            i_key = begin + tl.arange(0, block_k)
            m_key = (i_key >= first) & (i_key < 0)
            b_dq = _add_query_grad(
                b_dq, b_q, b_g, p_k, p_v, i_own, i_key, m_key, i_place, b_first, b_log_sum, b_dot,
                width, value_width, operand_type, block_d, block_v,
            )  # fmt: skip
        tl.store(p_grad_far + i_to, b_dq.to(p_grad_far.dtype.element_ty), mask=(i_d < width)[None, :])
    b_q = load_rows(p_near, i_grid, m_all, width, block_d, operand_type)
    b_dq = tl.zeros((block_q, block_d), tl.float32)
    for begin in range(tl.maximum(first, 0) // block_k * block_k, tl.max(i_place, 0) + 1, block_k):
        i_key = begin + tl.arange(0, block_k)
        b_dq = _add_query_grad(
            b_dq, b_q, b_g, p_k, p_v, i_own, i_key, i_key < chunk_size, i_place, b_first, b_log_sum, b_dot,
            width, value_width, operand_type, block_d, block_v,
        )  # fmt: skip
    tl.store(p_grad_near + i_to, b_dq.to(p_grad_near.dtype.element_ty), mask=(i_d < width)[None, :])


@triton.jit
def _add_query_grad(
    b_dq, b_q, b_g, p_k, p_v, i_own, i_key, m_key, i_place, b_first, b_log_sum, b_dot, width: tl.constexpr,
    value_width: tl.constexpr, operand_type: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Add (P ⊙ (g vᵀ − Σ g ⊙ out)) k of one block of keys."""
    b_k = load_rows(p_k, i_own + i_key, m_key, width, block_d, operand_type)
    b_v = load_rows(p_v, i_own + i_key, m_key, value_width, block_v, operand_type)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
    b_p = tl.exp2(log_weights(b_s, i_key, i_place, b_first, m_key) - b_log_sum[:, None])
    b_ds = b_p * (tl.dot(b_g, tl.trans(b_v), input_precision="tf32x3") - b_dot[:, None])
    return tl.dot(b_ds.to(operand_type), b_k, b_dq, input_precision="tf32x3")


@triton.jit(do_not_specialize=_VARYING)
def _key_grads_kernel(
    p_near, p_far, p_k, p_v, p_first, p_log_sum, p_grad, p_dot, p_grad_k, p_grad_v, chunks, heads, before,
    chunk_size: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, lookback: tl.constexpr,
    operand_type: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr, block_d: tl.constexpr,
    block_v: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a tile of keys and values, from the queries of its chunk and of the next one."""
    i_row = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (chunk_size + block_k - 1) // block_k
    i_chunk = (tl.program_id(0) // tiles).to(tl.int64)
    i_key = tl.program_id(0) % tiles * block_k + tl.arange(0, block_k)
    m_key = i_key < chunk_size
    i_grid = (i_row * (chunks + before) + i_chunk) * chunk_size + i_key
    b_k = load_rows(p_k, i_grid, m_key, width, block_d, operand_type)
    b_v = load_rows(p_v, i_grid, m_key, value_width, block_v, operand_type)
    b_dk = tl.zeros((block_k, block_d), tl.float32)
    b_dv = tl.zeros((block_k, block_v), tl.float32)
    i_own = i_chunk - before
    if i_own >= 0:
        for begin in range(tl.min(i_key, 0) // block_q * block_q, chunk_size, block_q):
            b_dk, b_dv = _add_key_grads(
                b_dk, b_dv, b_k, b_v, p_near, p_first, p_log_sum, p_grad, p_dot, i_row, i_own, begin, i_key, m_key,
                chunks, heads, before, chunk_size, width, value_width, operand_type, block_q, block_d, block_v,
            )  # fmt: skip
    if lookback:
        for begin in range(0, tl.where(i_own + 1 < chunks, chunk_size, 0), block_q):
            b_dk, b_dv = _add_key_grads(
                b_dk, b_dv, b_k, b_v, p_far, p_first, p_log_sum, p_grad, p_dot, i_row, i_own + 1, begin,
                i_key - chunk_size, m_key, chunks, heads, before, chunk_size, width, value_width, operand_type,
                block_q, block_d, block_v,
            )  # fmt: skip
    i_d, i_v = tl.arange(0, block_d), tl.arange(0, block_v)
    p_to = p_grad_k + i_grid[:, None] * width + i_d[None, :]
    tl.store(p_to, b_dk.to(p_grad_k.dtype.element_ty), mask=m_key[:, None] & (i_d < width)[None, :])
    p_to = p_grad_v + i_grid[:, None] * value_width + i_v[None, :]
    tl.store(p_to, b_dv.to(p_grad_v.dtype.element_ty), mask=m_key[:, None] & (i_v < value_width)[None, :])


@triton.jit
def _add_key_grads(
    b_dk, b_dv, b_k, b_v, p_q, p_first, p_log_sum, p_grad, p_dot, i_row, i_chunk, begin, i_key, m_key, chunks, heads,
    before, chunk_size: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, operand_type: tl.constexpr,
    block_q: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Add the gradients from one block of queries, with P (keys, queries): P g to those of the values, and
    (P ⊙ (v gᵀ − Σ g ⊙ out)) q to those of the keys."""
    i_place = begin + tl.arange(0, block_q)
    m_query = i_place < chunk_size
    i_query = i_chunk * chunk_size + i_place
    p_starts = p_first + i_row // heads * chunks * chunk_size + i_query
    b_first = tl.load(p_starts, mask=m_query, other=2**30).to(tl.int32) - ((i_chunk + before) * chunk_size).to(tl.int32)
    i_grid = i_row * chunks * chunk_size + i_query
    if tl.min(b_first, 0) <= tl.max(i_key, 0):
        b_q = load_rows(p_q, i_grid, m_query, width, block_d, operand_type)
        b_g = load_rows(p_grad, i_grid, m_query, value_width, block_v, operand_type)
        b_log_sum = tl.load(p_log_sum + i_grid, mask=m_query, other=0.0)
        b_dot = tl.load(p_dot + i_grid, mask=m_query, other=0.0)
        # Keys are rows from the start, so no product is transposed for the next one. A transpose needs registers and
        # has given wrong results on Hopper (fla-org/flash-linear-attention#640).
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="tf32x3")
        b_p = tl.exp2(log_weights_by_key(b_s, i_key, i_place, b_first, m_key) - b_log_sum[None, :])
        b_dv = tl.dot(b_p.to(operand_type), b_g, b_dv, input_precision="tf32x3")
        b_ds = b_p * (tl.dot(b_v, tl.trans(b_g), input_precision="tf32x3") - b_dot[None, :])
        b_dk = tl.dot(b_ds.to(operand_type), b_q, b_dk, input_precision="tf32x3")
    return b_dk, b_dv


def _tiles(laid: Laid, backward: bool) -> dict[str, Any]:
    """Return the arguments that the kernels share, with smaller tiles for 32 bits, for wide features and for backward,
    which holds twice as much."""
    v, block_d, block_v = laid.v, tile(laid.near.shape[2]), tile(laid.v.shape[2])
    large = v.itemsize == 2 and block_d + block_v <= 256
    block_q, block_k = (64, 64) if large else (32, 32)
    if large and not backward:
        block_q = 128
    return laid.arguments() | dict(
        p_v=v, value_width=v.shape[2], lookback=laid.far is not None, block_q=block_q, block_k=block_k,
        block_d=block_d, block_v=block_v,
    )  # fmt: skip


def _launch(kernel: Any, x: Tensor, chunk: int, block: int, arguments: dict[str, Any]) -> None:
    """Launch a kernel over tiles of ``block`` rows of each chunk of x (R, chunks · c, d)."""
    grid = x.shape[1] // chunk * blocks(chunk, block), len(x)
    Launch(kernel, grid, arguments, warps=8, stages=2).run()


def narrow_forward(laid: Laid) -> tuple[Tensor, Tensor]:
    """Return outputs (R, n · c, value width) and log₂ of the sums (R, n · c)."""
    near, v, given = laid.near, laid.v, _tiles(laid, backward=False)
    out, log_sum = v.new_empty(*near.shape[:2], v.shape[2]), near.new_empty(near.shape[:2], dtype=torch.float32)
    _launch(_forward_kernel, near, laid.chunk, given["block_q"], given | dict(p_out=out, p_log_sum=log_sum))
    return out, log_sum


def narrow_backward(laid: Laid, grad: Tensor, dot: Tensor, log_sum: Tensor) -> Grads:
    """Return the gradients of near, far, k and v; ``dot`` is the sum of P dP of each query."""
    grad_near, grad_far, grad_k, grad_v = grads = laid.empty_grads()
    given = _tiles(laid, backward=True) | dict(p_grad=grad, p_dot=dot, p_log_sum=log_sum)
    of_queries, of_keys = dict(p_grad_near=grad_near, p_grad_far=grad_far), dict(p_grad_k=grad_k, p_grad_v=grad_v)
    _launch(_query_grads_kernel, laid.near, laid.chunk, given["block_q"], given | of_queries)
    _launch(_key_grads_kernel, laid.k, laid.chunk, given["block_k"], given | of_keys)
    return grads
