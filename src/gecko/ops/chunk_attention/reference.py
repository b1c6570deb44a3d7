"""Reference implementation of chunk attention: one dense product with a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gecko.ops.chunk_attention.ring import Pattern
from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.chunk_attention import AttentionState


def chunk_attention_reference(
    inputs: tuple[Tensor, Tensor, Tensor], pattern: Pattern, state: AttentionState, segments: Segments
) -> tuple[Tensor, AttentionState]:
    """Compute ``chunk_attention`` from the scores of every query with the ring and all keys of the call."""
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
    return weights.to(v.dtype) @ values, type(state)(new_keys, new_values)
