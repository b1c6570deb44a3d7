"""Attention over the current and the previous chunk (SCA, paper Eq. 8), its variants, reference and context exchange.

Heads of queries may share heads of keys and values (grouped-query attention). The C kernels read shared heads in place.

With context parallelism, the queries in the first chunk of a rank may see the last chunk of the previous rank.

Sinks are the first tokens of a document, which stay visible after they have left the attention window.
They are rotated at their own positions, and a query for them at its own or at 2c − 1, whichever is less: a Llama has
learned no distances beyond its context, and none larger than those in the window are needed. Window and sinks share one
softmax: with L = log Σ exp(score) over the window, and scores s_j of the sinks outside it,
    w = softmax(L, s_1, …, s_n),   out = w_0 · (output of the window) + Σ_j w_j v_j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import choose_backend, products_are_rounded
from gecko.ops.chunk_attention.chunked import (
    Attended,
    AttentionState,
    Pattern,
    SinkTokens,
    chunk_attention_chunked,
    chunk_attention_step,
)
from gecko.ops.common import (
    check_shape,
    common_chunk_offset,
    compute_dtype,
    full_precision,
    layout_of_call,
    run_by_chunk_offset,
    run_by_length,
)
from gecko.ops.rotary import rotary_phases, rotate
from gecko.runtime.tensors import to_device
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
    """
    batch, heads, length, key_dim = q.shape
    if heads % k.shape[1]:
        raise ValueError(f"the heads of k must divide those of q; got {k.shape[1]} and {heads}.")
    check_shape("k", k, (batch, k.shape[1], length, key_dim))
    check_shape("v", v, (*k.shape[:3], v.shape[-1]))
    segments = layout_of_call(segments, batch, length, q.device)
    if state is None:
        given = batch, k.shape[1], pattern.chunk_size, key_dim, v.shape[-1], v.dtype, v.device
        state = segments.initial(
            ("attention", *given, pattern.sinks), lambda: AttentionState.empty(*given, sinks=pattern.sinks)
        )
    _check_state(pattern, state, k, v)
    rounded = products_are_rounded()
    with full_precision(q):
        if segments.ends is not None and not _cpu_takes(pattern, (q, k, v), segments, triton=True):
            return run_by_length(partial(chunk_attention, pattern=pattern), (q, k, v), state, segments)
        if choose_backend(v, triton=length > 1, cpu=False) == "triton":
            from gecko.ops.chunk_attention.triton import chunk_attention_triton

            return _attend(pattern, partial(_with_shared_heads, chunk_attention_triton), (q, k, v), state, segments)
        dtype = compute_dtype(q)
        inputs = (q.to(dtype), k.to(dtype), v)
        if length == 1:
            return _attend(pattern, partial(_with_shared_heads, chunk_attention_step), inputs, state, segments)
        form = partial(_attend, pattern, partial(_attend_to_window, rounded))
        return run_by_chunk_offset(form, inputs, state, segments, 2 * pattern.chunk_size)


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


def _cpu_takes(pattern: Pattern, inputs: tuple[Tensor, ...], segments: Segments, *, triton: bool) -> bool:
    """Return whether the C kernels run this call, and, with ``triton``, those of a GPU do not."""
    if choose_backend(*inputs, triton=triton) != "cpu":
        return False
    from gecko.ops.chunk_attention.cpu import takes

    return takes(inputs, pattern, common_chunk_offset(segments, 2 * pattern.chunk_size))


def _attend_to_window(
    rounded: bool, pattern: Pattern, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments
) -> Attended:
    """Attend in rows with the same ring slot. If ``rounded``, C kernels round factors of products with values."""
    if not _cpu_takes(pattern, inputs, segments, triton=False):
        return _with_shared_heads(chunk_attention_chunked, pattern, inputs, state, segments)
    from gecko.ops.chunk_attention.cpu import chunk_attention_cpu

    return chunk_attention_cpu(pattern, inputs, state, segments, rounded)


class SinkPlaces(NamedTuple):
    """Where the sinks of the tokens of a call are. Dimension 1 is 1 instead of T if no document starts in the call."""

    place: Tensor
    """(B, T or 1, sinks) int64: number of the token in the call; negative if the state holds it."""
    visible: Tensor
    """(B, T, sinks) bool: whether the token has left the window of the query."""
    turns: Tensor
    """(B, T, d / 2): phases by which a query is rotated for its sinks."""
    seen: bool
    """Whether any query sees a sink."""

    @classmethod
    def of(cls, pattern: Pattern, segments: Segments, width: int, dtype: torch.dtype) -> SinkPlaces:
        position = segments.clock.position[:, None] + torch.arange(segments.length, device="cpu")
        start, first = segments.document_starts, pattern.first_position(position)
        visible = start[..., None] + torch.arange(pattern.sinks, device="cpu") < first[..., None]
        turns = rotary_phases(pattern.sink_turn(position - start), pattern.frequencies(width), dtype, segments.device)
        seen = torch.compiler.is_exporting() or bool(visible.any())  # an export chooses nothing by values
        return cls(_places(pattern, segments), to_device(visible, segments.device), turns, seen)


def _places(pattern: Pattern, segments: Segments) -> Tensor:
    start = segments.document_starts if segments.starts is not None else segments.document_starts[:, :1]
    return (start - segments.clock.position[:, None])[..., None] + torch.arange(pattern.sinks, device="cpu")


def with_sinks(
    pattern: Pattern, inputs: tuple[Tensor, ...], window: tuple[Tensor, Tensor], state: SinkTokens, segments: Segments
) -> tuple[Tensor, SinkTokens]:
    """Return attention to window and sinks, (B, H, T, e), and the sinks of the last token's document.

    Args:
        inputs: q, k and v of ``chunk_attention``.
        window: output of the window, and log Σ exp(score), (B, H, T).
    """
    q, k, v = inputs
    q = q.to(compute_dtype(q))
    build = partial(SinkPlaces.of, pattern, width=q.shape[-1], dtype=q.dtype)
    places = segments.shared(("sinks", pattern, q.dtype, q.shape[-1]), build)
    out, log_sums = window
    if places.seen:
        shared = q.shape[1] // k.shape[1]
        found = _found(pattern, places.place, k, v, state)
        keys, values = (x.repeat_interleave(shared, 1) for x in found)
        turned = rotate(q, places.turns[:, None], pattern.turned(q.shape[1])).unsqueeze(3)
        scores = (turned @ keys.mT).squeeze(3).masked_fill(~places.visible[:, None], -torch.inf)
        weights = torch.cat([log_sums.unsqueeze(-1), scores], -1).softmax(-1).to(v.dtype)
        out = weights[..., :1] * out + (weights[..., None, 1:] @ values).squeeze(3)
    return out, sinks_after(pattern, segments, k, v, state)


def _found(pattern: Pattern, place: Tensor, k: Tensor, v: Tensor, state: SinkTokens) -> tuple[Tensor, Tensor]:
    """Return keys and values of the sinks at ``place`` (B, n, sinks), each (B, K, n, sinks, width)."""
    rows, count, sinks = place.shape
    at = to_device(place, k.device)
    index = at.clamp(0, k.shape[2] - 1).view(rows, 1, count * sinks, 1)

    def pick(new: Tensor) -> Tensor:
        return new.gather(2, index.expand(-1, new.shape[1], -1, new.shape[3]))

    def or_held(new: Tensor, held: Tensor) -> Tensor:
        new = new.unflatten(2, (count, sinks))
        return torch.where((at >= 0)[:, None, :, :, None], new, held.to(new.dtype).unsqueeze(2))

    keys = pick(k).to(compute_dtype(k))
    keys = pattern.rotate(keys, torch.arange(sinks, device="cpu").repeat(count))
    return or_held(keys, state.keys), or_held(pick(v), state.values)


def sinks_after(pattern: Pattern, segments: Segments, k: Tensor, v: Tensor, state: SinkTokens | None) -> SinkTokens:
    """Return the sinks of the document that the last token belongs to; zero where it has fewer tokens, or where they
    were before the call and ``state`` is None."""
    if state is None:
        state = SinkTokens(*(x.new_zeros(*x.shape[:2], pattern.sinks, x.shape[3]) for x in (k, v)))
    place = _places(pattern, segments)[:, -1:]
    read = (segments.end.position - segments.clock.position)[:, None, None]
    there = to_device(place < read, k.device)[:, None, 0, :, None]
    keys, values = (x.squeeze(2) for x in _found(pattern, place, k, v, state))
    return SinkTokens(torch.where(there, keys, 0), torch.where(there, values, 0))


def state_before(
    state: AttentionState | None, arrived: Sequence[Tensor], pattern: Pattern, segments: Segments,
    exchange: ContextExchange,
) -> AttentionState:  # fmt: skip
    """Return the state before the first token of a context rank, from the last chunk of the previous rank.

    Args:
        state: that before the call on rank 0; on the other ranks it is None.
        arrived: key and value, (B, H, c, d), keys not rotated yet; for patterns with sinks also keys and values of
            ``sinks_after`` on earlier ranks, without their state, (R − 1, B, K, sinks, width).
    """
    key, value, *sinks = arrived
    places = torch.arange(pattern.chunk_size, device="cpu")
    key = pattern.rotate(key.to(compute_dtype(key)), places) * float(not exchange.first)
    # The chunk of each row is in one half of the ring, and zero in the other.
    is_first = ((segments.clock.position // pattern.chunk_size).to(value.device) % 2 == 1).view(-1, 1, 1, 1)
    keys, values = (torch.cat([x * is_first, x * ~is_first], dim=2) for x in (key, value))
    first = None
    if sinks:  # those of the document that is open before the rank; each sink is on one rank
        of_document = (exchange.counts > 0)[:, :, None, None, None]
        first = SinkTokens(*(torch.where(of_document, x, 0).sum(0) for x in sinks))
        if state is not None and state.sinks is not None:
            first = SinkTokens(state.sinks.keys + first.keys, state.sinks.values + first.values)
    if state is not None:
        keys, values = state.keys + keys, state.values + values
    return AttentionState(keys, values, first)


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
    pattern: Pattern, inputs: tuple[Tensor, Tensor, Tensor], t: int, position: Tensor, sinks: SinkTokens,
    segments: Segments,
) -> tuple[SinkTokens, Tensor]:  # fmt: skip
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
    turned = pattern.rotate(q, pattern.sink_turn(place)[:, None])
    scores = turned @ keys.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return SinkTokens(keys, values), scores.masked_fill(~outside[:, None, None], -torch.inf)
