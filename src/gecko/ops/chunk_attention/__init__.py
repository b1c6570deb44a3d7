"""Attention over the current and the previous chunk (SCA, paper Eq. 8) and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gecko.config import Attention
from gecko.ops.chunk_attention.chunked import attend_chunks
from gecko.ops.chunk_attention.decode import attend_token
from gecko.ops.chunk_attention.pattern import Pattern
from gecko.ops.chunk_attention.reference import chunk_attention_reference
from gecko.ops.dtypes import check_segments, check_shape, compute_dtype, full_precision
from gecko.ops.kernels import kernels_of, kernels_run_on, native_runs_on, products_are_rounded
from gecko.ops.phases import common_phase, run_by_phase
from gecko.records import TensorRecord
from gecko.segments import Segments

__all__ = ["AttentionState", "Pattern", "chunk_attention", "chunk_attention_reference"]


@dataclass(frozen=True)
class AttentionState(TensorRecord):
    """The last 2c tokens, as a ring: position j lies at slot j mod 2c.

    keys: (B, H, 2c, key_head_dim), rotated by their position inside their chunk.
    values: (B, H, 2c, value_head_dim). Both in the dtype of the activations.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(
        cls, batch: int, heads: int, chunk_size: int, key_dim: int, value_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> AttentionState:  # fmt: skip
        slots = (batch, heads, 2 * chunk_size)
        return cls(
            torch.zeros(*slots, key_dim, dtype=dtype, device=device),
            torch.zeros(*slots, value_dim, dtype=dtype, device=device),
        )


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int,
    *,
    attention: Attention = "sliding_chunk",
    rope_base: float = 500_000.0,
    rope_heads: int | None = None,
    state: AttentionState | None = None,
    segments: Segments | None = None,
) -> tuple[Tensor, AttentionState]:
    """softmax(q kᵀ) v over the keys in the window, not after the query, of its document.

    The window of a query in chunk u: chunks u − 1 and u (``sliding_chunk``), chunk u (``chunk``), the
    last c tokens (``sliding_window``). Chunks are cut at multiples of ``chunk_size`` of the stream.
    Softmax in float32 or wider; no scale besides the one that q and k carry.

    Args:
        q, k: (B, H, T, key_head_dim) before rotary embedding; v: (B, H, T, value_head_dim).
        rope_heads: how many heads, from the first, are rotated; None is all.

    Returns:
        (B, H, T, value_head_dim) in the dtype of v, and the state after the last token.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    batch, heads, length, key_dim = q.shape
    check_shape("k", k, (batch, heads, length, key_dim))
    check_shape("v", v, (batch, heads, length, v.shape[-1]))
    pattern = Pattern(chunk_size, attention, rope_base, heads if rope_heads is None else rope_heads)
    if state is None:
        state = AttentionState.empty(batch, heads, chunk_size, key_dim, v.shape[-1], v.dtype, v.device)
    check_shape("state.keys", state.keys, (batch, heads, 2 * chunk_size, key_dim))
    check_shape("state.values", state.values, (batch, heads, 2 * chunk_size, v.shape[-1]))
    segments = segments or Segments.build(batch, length, device=q.device)
    check_segments(segments, batch, length)
    rounded = products_are_rounded()
    with full_precision(q):
        if length > 1 and kernels_run_on(v):
            from gecko.ops.chunk_attention.triton import attend_on_kernels

            return attend_on_kernels((q, k, v), pattern, state, segments)
        dtype = compute_dtype(q)
        inputs = (q.to(dtype), k.to(dtype), v)
        if length == 1:
            return attend_token(inputs, pattern, state, segments)
        form = partial(_attend, pattern, rounded)
        if common_phase(segments, 2 * chunk_size) is None:
            return run_by_phase(form, inputs, state, segments, 2 * chunk_size)
        return form(inputs, state, segments)


def _attend(
    pattern: Pattern, rounded: bool, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments
) -> tuple[Tensor, AttentionState]:
    """Rows that agree on their phase; products with values ``rounded`` where kernels in C take them."""
    if native_runs_on(*inputs, state.keys, state.values):
        native = kernels_of("chunk_attention", "native")
        start = common_phase(segments, 2 * pattern.chunk_size)
        if native.takes(inputs, pattern, start):
            return native.attend_native(pattern, inputs, state, segments, start, rounded)
    return attend_chunks(pattern, inputs, state, segments)
