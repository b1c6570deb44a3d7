"""Attention over the current and the previous chunk (SCA, paper Eq. 8), its variants, reference and context exchange.

Heads of queries may share heads of keys and values (grouped-query attention). The C kernels read shared heads in place.

With context parallelism, the queries in the first chunk of a rank may see the last chunk of the previous rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import choose_backend, kernels_of, products_are_rounded
from gecko.ops.chunk_attention.chunked import (
    Attended,
    AttentionState,
    Pattern,
    SinkTokens,
    chunk_attention_chunked,
    chunk_attention_step,
)
from gecko.ops.chunk_attention.sinks import sinks_after, sinks_before, with_sinks
from gecko.ops.common import (
    check_segments,
    check_shape,
    common_chunk_offset,
    compute_dtype,
    full_precision,
    run_by_chunk_offset,
    run_by_length,
)
from gecko.segments import ContextExchange, Segments

__all__ = [
    "AttentionState", "Pattern", "SinkTokens", "chunk_attention", "chunk_attention_reference", "sinks_after",
    "state_before",
]  # fmt: skip


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *,
    state: AttentionState | None = None, segments: Segments | None = None,
) -> tuple[Tensor, AttentionState]:  # fmt: skip
    """Compute softmax(q kᵀ) v, where each query sees the keys of its document in its window up to its own position.

    The window of a query in chunk u is chunks u − 1 and u (``sliding_chunk``), chunk u (``chunk``), or the last c
    tokens (``sliding_window``). Chunks start at the multiples of ``chunk_size`` in the stream. The first ``sinks``
    tokens of a document stay visible after they have left the window. Softmax is float32 or wider. Scores are not
    scaled; q and k include any scale.

    Args:
        q: (B, H, T, key_head_dim); k: (B, K, T, key_head_dim), both before rotary embedding; v: (B, K, T,
            value_head_dim). K divides H, and query head h uses key head h · K // H.

    Returns:
        (B, H, T, value_head_dim) in the dtype of v, and the state after the last token.

    Raises:
        ValueError: the shapes are inconsistent.
    """
    batch, heads, length, key_dim = q.shape
    if heads % k.shape[1]:
        raise ValueError(f"the heads of k must divide those of q; got {k.shape[1]} and {heads}.")
    check_shape("k", k, (batch, k.shape[1], length, key_dim))
    check_shape("v", v, (*k.shape[:3], v.shape[-1]))
    segments = segments or Segments.build(batch, length, device=q.device)
    check_segments(segments, batch, length)
    if state is None:
        given = batch, k.shape[1], pattern.chunk_size, key_dim, v.shape[-1], v.dtype, v.device
        state = segments.initial(
            ("attention", *given, pattern.sinks), lambda: AttentionState.empty(*given, sinks=pattern.sinks)
        )
    _check_state(pattern, state, k, v)
    rounded = products_are_rounded()
    with full_precision(q):
        if segments.ends is not None and not _reads_padded_rows(pattern, (q, k, v), segments):
            return run_by_length(
                lambda inputs, state, segments: chunk_attention(
                    inputs[0], inputs[1], inputs[2], pattern, state=state, segments=segments
                ),
                (q, k, v), state, segments,
            )  # fmt: skip
        if choose_backend(v, triton=length > 1, cpu=False) == "triton":
            from gecko.ops.chunk_attention.triton import chunk_attention_triton

            return _attend(pattern, partial(_with_shared_heads, chunk_attention_triton), (q, k, v), state, segments)
        dtype, period = compute_dtype(q), 2 * pattern.chunk_size
        inputs = (q.to(dtype), k.to(dtype), v)
        if length == 1:
            return _attend(pattern, partial(_with_shared_heads, chunk_attention_step), inputs, state, segments)
        form = partial(_attend, pattern, partial(_attend_to_window, rounded))
        if common_chunk_offset(segments, period) is None:
            return run_by_chunk_offset(form, inputs, state, segments, period)
        return form(inputs, state, segments)


def _check_state(pattern: Pattern, state: AttentionState, k: Tensor, v: Tensor) -> None:
    parts = {"state": (state, 2 * pattern.chunk_size), "state.sinks": (state.sinks, pattern.sinks)}
    if (state.sinks is None) != (pattern.sinks == 0):
        raise ValueError(f"the state must hold {pattern.sinks} sinks, as the pattern has; got {state.sinks}.")
    for name, (part, slots) in parts.items():
        if part is not None:
            check_shape(f"{name}.keys", part.keys, (*k.shape[:2], slots, k.shape[-1]))
            check_shape(f"{name}.values", part.values, (*v.shape[:2], slots, v.shape[-1]))


def _attend(
    pattern: Pattern, to_window: Callable[..., Attended], inputs: tuple[Tensor, ...], state: AttentionState,
    segments: Segments,
) -> tuple[Tensor, AttentionState]:  # fmt: skip
    """Attend to the window and the sinks; ``to_window`` is the form for the window."""
    out, log_sums, after = to_window(pattern, inputs, state, segments)
    if state.sinks is not None:
        assert log_sums is not None, "every form returns the sums for a pattern with sinks"
        out, sinks = with_sinks(pattern, inputs, (out, log_sums), state.sinks, segments)
        after = replace(after, sinks=sinks)
    return out, after.to(torch.bfloat16, torch.bfloat16) if pattern.bfloat16_window else after


def _with_shared_heads(
    form: Callable[..., Attended], pattern: Pattern, inputs: tuple[Tensor, ...], state: AttentionState,
    segments: Segments,
) -> Attended:  # fmt: skip
    """Run a form that needs a head of keys and values for each head of queries."""
    q, k, v = inputs
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return form(pattern, inputs, state, segments)
    k, v, keys, values = (x.repeat_interleave(shared, 1) for x in (k, v, state.keys, state.values))
    out, log_sums, after = form(pattern, (q, k, v), AttentionState(keys, values), segments)
    return out, log_sums, after.map(lambda x: x[:, ::shared])


def _reads_padded_rows(pattern: Pattern, inputs: tuple[Tensor, ...], segments: Segments) -> bool:
    """Return whether the C kernels run this call, so that padded rows need not be split by length."""
    if choose_backend(*inputs) != "cpu":
        return False
    start = common_chunk_offset(segments, 2 * pattern.chunk_size)
    takes: bool = kernels_of("chunk_attention", "cpu").takes(inputs, pattern, start)
    return takes


def _attend_to_window(
    rounded: bool, pattern: Pattern, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments
) -> Attended:
    """Attend in rows with the same ring slot. If ``rounded``, C kernels round factors of products with values."""
    if choose_backend(*inputs, triton=False) == "cpu":
        cpu = kernels_of("chunk_attention", "cpu")
        start = common_chunk_offset(segments, 2 * pattern.chunk_size)
        if cpu.takes(inputs, pattern, start):
            attended: Attended = cpu.chunk_attention_cpu(pattern, inputs, state, segments, start, rounded)
            return attended
    return _with_shared_heads(chunk_attention_chunked, pattern, inputs, state, segments)


def state_before(
    state: AttentionState | None, arrived: Sequence[Tensor], pattern: Pattern, segments: Segments,
    exchange: ContextExchange,
) -> AttentionState:  # fmt: skip
    """Return the state before the first token of a context rank, from the last chunk of the previous rank.

    Args:
        state: that before the call on rank 0; on the other ranks it is None.
        arrived: key and value, (B, H, c, d), keys not rotated yet; for patterns with sinks also those of the sinks.
    """
    key, value, *sinks = arrived
    places = torch.arange(pattern.chunk_size, device="cpu")
    key = pattern.rotate(key.to(compute_dtype(key)), places) * float(not exchange.first)
    half = (segments.clock.position // pattern.chunk_size + 1).to(value.device) % 2
    keys, values = _ring(key, half), _ring(value, half)
    first = sinks_before(None if state is None else state.sinks, sinks, exchange) if sinks else None
    if state is not None:
        keys, values = state.keys + keys, state.values + values
    return AttentionState(keys, values, first)


def _ring(chunk: Tensor, half: Tensor) -> Tensor:
    """Return (B, H, 2c, d) with the chunk of each row in half ``half`` of the ring, and zero in the other half."""
    first = (half == 0).view(-1, 1, 1, 1)
    return torch.cat([chunk * first, chunk * ~first], dim=2)


def chunk_attention_reference(
    inputs: tuple[Tensor, Tensor, Tensor], pattern: Pattern, state: AttentionState, segments: Segments
) -> tuple[Tensor, AttentionState]:
    """Compute ``chunk_attention`` as one product with a mask, of every query with the sinks, the ring, and all keys of
    the call. A sink is scored for as long as it is outside the window."""
    q, k, v = inputs
    chunk, length, device, shared = pattern.chunk_size, q.shape[2], q.device, q.shape[1] // k.shape[1]
    start = segments.clock.position.to(device)[:, None]
    position = start + torch.arange(length, device=device)
    slot = torch.arange(2 * chunk, device=device)
    in_ring = start - 1 - (start - 1 - slot) % (2 * chunk)
    key_position = torch.cat([in_ring, position], dim=1)

    keys = torch.cat([state.keys, pattern.rotate(k, (position % chunk)[:, None])], dim=2)
    values = torch.cat([state.values, v], dim=2)
    all_keys, all_values = (x.repeat_interleave(shared, 1) for x in (keys, values))
    near = pattern.rotate(q, (position % chunk)[:, None]) @ all_keys.mT
    far = pattern.rotate(q, (position % chunk + chunk)[:, None]) @ all_keys.mT
    lag = position[:, :, None] // chunk - key_position[:, None] // chunk
    scores = torch.where((lag == 0)[:, None], near, far)

    visible = (key_position[:, None] <= position[:, :, None]) & (lag <= pattern.lookback)
    visible &= key_position[:, None] >= segments.document_starts.to(device)[:, :, None]
    if pattern.attention == "sliding_window":
        visible &= key_position[:, None] > position[:, :, None] - chunk
    scores = scores.masked_fill(~visible[:, None], -torch.inf)

    new_keys, new_values, sinks, outputs = state.keys, state.values, state.sinks, []
    for t in range(length):
        written = (slot == position[:, t : t + 1] % (2 * chunk))[:, None, :, None]
        new_keys = torch.where(written, keys[:, :, 2 * chunk + t, None], new_keys)
        new_values = torch.where(written, v[:, :, t, None], new_values)
        of_token, seen = scores[:, :, t, None], all_values
        if sinks is not None:
            sinks, sink_scores = _sinks_reference(pattern, (q, k, v), t, position[:, t], sinks, segments)
            of_token = torch.cat([sink_scores, of_token], -1)
            seen = torch.cat([sinks.values.repeat_interleave(shared, 1), all_values], 2)
        outputs.append(of_token.softmax(-1).to(v.dtype) @ seen)
    return torch.cat(outputs, 2), AttentionState(new_keys, new_values, sinks)


def _sinks_reference(
    pattern: Pattern,
    inputs: tuple[Tensor, Tensor, Tensor],
    t: int,
    position: Tensor,
    sinks: SinkTokens,
    segments: Segments,
) -> tuple[SinkTokens, Tensor]:
    """Return the sinks after token ``t``, and its scores with them, (B, H, 1, sinks); −∞ for those in the window."""
    q, k, v = (x[:, :, t : t + 1] for x in inputs)
    chunk, start = pattern.chunk_size, segments.document_starts[:, t].to(q.device)
    number = torch.arange(pattern.sinks, device=q.device)
    place = (position - start)[:, None]
    written, later = ((number == place)[:, None, :, None], (number > place)[:, None, :, None])
    keys, values = (
        torch.where(written, new, old).masked_fill(later, 0)
        for new, old in ((pattern.rotate(k, place[:, None]), sinks.keys), (v, sinks.values))
    )
    first = position // chunk * chunk - pattern.lookback * chunk
    first = position - chunk + 1 if pattern.attention == "sliding_window" else first
    outside = start[:, None] + number < first[:, None]
    scores = pattern.rotate(q, place[:, None]) @ keys.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return SinkTokens(keys, values), scores.masked_fill(~outside[:, None, None], -torch.inf)
