"""Attention over the current and the previous chunk (SCA, paper Eq. 8), its variants, reference and context exchange.

With context parallelism, the queries in the first chunk of a rank may see the last chunk of the previous rank.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gecko.config import Attention
from gecko.ops.backends.dispatch import choose_backend, kernels_of, products_are_rounded
from gecko.ops.chunk_attention.chunked import AttentionState, Pattern, chunk_attention_chunked, chunk_attention_step
from gecko.ops.common import (
    check_segments,
    check_shape,
    common_chunk_offset,
    compute_dtype,
    full_precision,
    run_by_chunk_offset,
    run_by_length,
)
from gecko.segments import Segments

__all__ = ["AttentionState", "Pattern", "chunk_attention", "chunk_attention_reference"]


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
    """Compute softmax(q kᵀ) v, where each query sees the keys of its document in its window up to its own position.

    The window of a query in chunk u is chunks u − 1 and u (``sliding_chunk``), chunk u (``chunk``), or the last c
    tokens (``sliding_window``). Chunks start at the multiples of ``chunk_size`` in the stream. Softmax is float32 or
    wider. Scores are not scaled; q and k include any scale.

    Args:
        q, k: (B, H, T, key_head_dim) before rotary embedding; v: (B, H, T, value_head_dim).
        rope_heads: number of heads, from the first, that are rotated; None: all.

    Returns:
        (B, H, T, value_head_dim) in the dtype of v, and the state after the last token.

    Raises:
        ValueError: the shapes are inconsistent.
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
        if segments.ends is not None and not _reads_padded_rows(pattern, (q, k, v), state, segments):
            return run_by_length(
                lambda inputs, state, segments: chunk_attention(
                    inputs[0], inputs[1], inputs[2], chunk_size, attention=attention, rope_base=rope_base,
                    rope_heads=rope_heads, state=state, segments=segments,
                ),
                (q, k, v), state, segments,
            )  # fmt: skip
        if choose_backend(v, triton=length > 1, cpu=False) == "triton":
            from gecko.ops.chunk_attention.triton import chunk_attention_triton

            return chunk_attention_triton((q, k, v), pattern, state, segments)
        dtype = compute_dtype(q)
        inputs = (q.to(dtype), k.to(dtype), v)
        if length == 1:
            return chunk_attention_step(inputs, pattern, state, segments)
        form = partial(_attend, pattern, rounded)
        if common_chunk_offset(segments, 2 * chunk_size) is None:
            return run_by_chunk_offset(form, inputs, state, segments, 2 * chunk_size)
        return form(inputs, state, segments)


def _reads_padded_rows(pattern: Pattern, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments) -> bool:
    """Return whether one call of the C kernels reads rows of different lengths."""
    if choose_backend(*inputs, state.keys, state.values) != "cpu":
        return False
    start = common_chunk_offset(segments, 2 * pattern.chunk_size)
    takes: bool = kernels_of("chunk_attention", "cpu").takes(inputs, pattern, start)
    return takes


def _attend(
    pattern: Pattern, rounded: bool, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments
) -> tuple[Tensor, AttentionState]:
    """Attend in rows with the same ring slot. If ``rounded``, C kernels round factors of products with values."""
    if choose_backend(*inputs, state.keys, state.values, triton=False) == "cpu":
        cpu = kernels_of("chunk_attention", "cpu")
        start = common_chunk_offset(segments, 2 * pattern.chunk_size)
        if cpu.takes(inputs, pattern, start):
            return cpu.chunk_attention_cpu(pattern, inputs, state, segments, start, rounded)
    return chunk_attention_chunked(pattern, inputs, state, segments)


def state_before(
    state: AttentionState | None, key: Tensor, value: Tensor, pattern: Pattern, segments: Segments, first: bool
) -> AttentionState:
    """Return the state before the first token of a context rank, from the last chunk of the previous rank.

    Args:
        state: that before the call on rank 0, where ``first`` is true; on the other ranks it is None.
        key, value: (B, H, c, d); the keys are not rotated yet.
    """
    key = pattern.rotate(key.to(compute_dtype(key)), torch.arange(pattern.chunk_size, device="cpu")) * float(not first)
    half = (segments.clock.position // pattern.chunk_size + 1).to(value.device) % 2
    arrived = AttentionState(_ring(key, half), _ring(value, half))
    if state is None:
        return arrived
    return AttentionState(state.keys + arrived.keys, state.values + arrived.values)


def _ring(chunk: Tensor, half: Tensor) -> Tensor:
    """Return (B, H, 2c, d) with the chunk of each row in half ``half`` of the ring, and zero in the other half."""
    first = (half == 0).view(-1, 1, 1, 1)
    return torch.cat([chunk * first, chunk * ~first], dim=2)


def chunk_attention_reference(
    inputs: tuple[Tensor, Tensor, Tensor], pattern: Pattern, state: AttentionState, segments: Segments
) -> tuple[Tensor, AttentionState]:
    """Compute ``chunk_attention`` as one product with a mask, of every query with the ring and all keys of the call."""
    q, k, v = inputs
    chunk, length, device = pattern.chunk_size, q.shape[2], q.device
    start = segments.clock.position.to(device)[:, None]
    position = start + torch.arange(length, device=device)
    slot = torch.arange(2 * chunk, device=device)
    in_ring = start - 1 - (start - 1 - slot) % (2 * chunk)
    key_position = torch.cat([in_ring, position], dim=1)

    keys = torch.cat([state.keys, pattern.rotate(k, (position % chunk)[:, None])], dim=2)
    values = torch.cat([state.values, v], dim=2)
    near = pattern.rotate(q, (position % chunk)[:, None]) @ keys.mT
    far = pattern.rotate(q, (position % chunk + chunk)[:, None]) @ keys.mT
    lag = position[:, :, None] // chunk - key_position[:, None] // chunk
    scores = torch.where((lag == 0)[:, None], near, far)

    visible = (key_position[:, None] <= position[:, :, None]) & (lag <= pattern.lookback)
    visible &= key_position[:, None] >= segments.document_starts.to(device)[:, :, None]
    if pattern.attention == "sliding_window":
        visible &= key_position[:, None] > position[:, :, None] - chunk
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)

    new_keys, new_values = state.keys, state.values
    for t in range(length):
        written = (slot == position[:, t : t + 1] % (2 * chunk))[:, None, :, None]
        new_keys = torch.where(written, keys[:, :, 2 * chunk + t, None], new_keys)
        new_values = torch.where(written, v[:, :, t, None], new_values)
    return weights.to(v.dtype) @ values, AttentionState(new_keys, new_values)
