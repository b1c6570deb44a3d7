"""Sinks: the first tokens of a document, which stay visible after they have left the attention window.

They are rotated at their own positions. Window and sinks share one softmax: with L = log Σ exp(score) over the window,
and scores s_j of the sinks outside it,
    w = softmax(L, s_1, …, s_n),   out = w_0 · (output of the window) + Σ_j w_j v_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gecko.ops.chunk_attention.chunked import Pattern, SinkTokens
from gecko.ops.common import compute_dtype
from gecko.ops.rotary import rotary_phases, rotate
from gecko.runtime.tensors import to_device
from gecko.segments import ContextExchange, Segments


class SinkPlaces(NamedTuple):
    """Where the sinks of the tokens of a call are. Dimension 1 is 1 instead of T if no document starts in the call."""

    place: Tensor
    """(B, T or 1, sinks) int64: number of the token in the call; negative if the state holds it."""
    visible: Tensor
    """(B, T, sinks) bool: whether the token has left the window of the query."""
    turns: Tensor
    """(B, T, d / 2): phases by which a query is rotated for its sinks, its position in its document."""
    seen: bool
    """Whether any query sees a sink."""

    @classmethod
    def of(cls, pattern: Pattern, segments: Segments, width: int, dtype: torch.dtype) -> SinkPlaces:
        start, chunk = segments.document_starts, pattern.chunk_size
        position = segments.clock.position[:, None] + torch.arange(segments.length, device="cpu")
        first = (position // chunk - pattern.lookback) * chunk
        if pattern.attention == "sliding_window":
            first = position - chunk + 1
        visible = start[..., None] + torch.arange(pattern.sinks, device="cpu") < first[..., None]
        turns = rotary_phases(position - start, pattern.frequencies(width), dtype, segments.device)
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


def sinks_before(state: SinkTokens | None, arrived: Sequence[Tensor], exchange: ContextExchange) -> SinkTokens:
    """Return the sinks of the document that is open before the first token of a context rank.

    Args:
        state: that before the call on rank 0; on the other ranks it is None.
        arrived: (R − 1, B, K, sinks, width), keys and values of ``sinks_after`` on earlier ranks, without their state.
            Each sink is on one rank.
    """
    of_document = (exchange.counts > 0)[:, :, None, None, None]
    keys, values = (torch.where(of_document, x, 0).sum(0) for x in arrived)
    return SinkTokens(keys, values) if state is None else SinkTokens(state.keys + keys, state.values + values)
