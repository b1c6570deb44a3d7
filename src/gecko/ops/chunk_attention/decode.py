"""Chunk attention for one token, each row at its own place in its own chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gecko.ops.chunk_attention.pattern import Pattern
from gecko.ops.rotary import rotary_phases, rotate
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
    token = segments.shared(("token", pattern, q.dtype, q.shape[-1]), lambda: _Token.of(pattern, segments, q))
    write = Tensor.scatter_ if segments.overwrites else Tensor.scatter
    keys = write(state.keys.to(q.dtype), 2, token.slot.expand_as(k), rotate(k, token.key_phases, pattern.rope_heads))
    values = write(state.values.to(v.dtype), 2, token.slot.expand_as(v), v)
    turned = rotate(q.expand(-1, -1, 2, -1), token.query_phases, pattern.rope_heads)
    # One row times a matrix: on CPUs, a matrix times one column takes several times as long.
    scores = (turned.unsqueeze(-2) @ keys.unflatten(2, (2, -1)).mT).flatten(2)
    weights = (scores + token.bias).softmax(-1)
    return weights.to(v.dtype).unsqueeze(2) @ values, type(state)(keys, values)


@dataclass(frozen=True)
class _Token:
    """What the token's place in the stream comes to, for each row; the same in all layers."""

    slot: Tensor
    """(B, 1, 1, 1): where the ring takes the token."""
    key_phases: Tensor
    """(B, 1, 1, d / 2)"""
    query_phases: Tensor
    """(B, 1, 2, d / 2), by half of the ring."""
    bias: Tensor
    """(B, 1, 2c): 0 for the ring's slots whose tokens the query sees, else −∞."""

    @classmethod
    def of(cls, pattern: Pattern, segments: Segments, q: Tensor) -> _Token:
        chunk, position = pattern.chunk_size, segments.clock.position.unsqueeze(1)
        place, own_half = position % chunk, position // chunk % 2
        turns = place + chunk * (torch.arange(2) != own_half)
        key_phases, query_phases = (
            rotary_phases(positions, q.shape[-1], pattern.rope_base, q.dtype, q.device)[:, None]
            for positions in (place, turns)
        )
        slot = (position % (2 * chunk)).to(q.device).view(-1, 1, 1, 1)
        unseen = ~_visible(pattern, segments)
        bias = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, -torch.inf)
        return cls(slot, key_phases, query_phases, bias.to(q.device).unsqueeze(1))


def _visible(pattern: Pattern, segments: Segments) -> Tensor:
    """(B, 2c) bool on the CPU: the ring slots whose tokens the query sees."""
    chunk, position = pattern.chunk_size, segments.clock.position.unsqueeze(1)
    held = position - (position - torch.arange(2 * chunk)) % (2 * chunk)
    if pattern.attention == "sliding_window":
        first = position - chunk + 1
    else:
        first = (position // chunk - pattern.lookback) * chunk
    return held >= torch.maximum(first, segments.document_starts)
