"""Chunk attention for one token, each row at its own place in its own chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gecko.ops.chunk_attention.pattern import Pattern
from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.chunk_attention import AttentionState


def attend_token(
    inputs: tuple[Tensor, Tensor, Tensor], pattern: Pattern, state: AttentionState, segments: Segments
) -> tuple[Tensor, AttentionState]:
    """Write the token into the ring, then one query against the ring's two halves.

    The half that holds the query's own chunk sees it turned by its place, the other one turned by c more.
    """
    q, k, v = inputs
    chunk, position = pattern.chunk_size, segments.clock.position
    place = position % chunk
    slot = (position % (2 * chunk)).to(q.device).view(-1, 1, 1, 1)
    key = pattern.rotate(k, place.view(-1, 1, 1))
    keys = state.keys.to(key.dtype).scatter(2, slot.expand_as(key), key)
    values = state.values.to(v.dtype).scatter(2, slot.expand_as(v), v)

    own_half = (position // chunk) % 2
    distance = torch.arange(2) != own_half[:, None]
    turned = pattern.rotate(q.expand(-1, -1, 2, -1), (place[:, None] + chunk * distance).unsqueeze(1))
    scores = (keys.unflatten(2, (2, chunk)) @ turned.unsqueeze(-1)).flatten(2)
    weights = scores.masked_fill(~_visible(pattern, segments).to(q.device).unsqueeze(1), -torch.inf).softmax(-1)
    return weights.to(v.dtype).unsqueeze(2) @ values, type(state)(keys, values)


def _visible(pattern: Pattern, segments: Segments) -> Tensor:
    """(B, 2c) bool on the CPU: the ring slots whose tokens the query sees."""

    def build() -> Tensor:
        chunk, position = pattern.chunk_size, segments.clock.position.unsqueeze(1)
        held = position - (position - torch.arange(2 * chunk)) % (2 * chunk)
        if pattern.attention == "sliding_window":
            first = position - chunk + 1
        else:
            first = (position // chunk - pattern.lookback) * chunk
        return held >= torch.maximum(first, segments.document_starts)

    return segments.shared(("visible", pattern), build)
