"""What attention needs of the rank before: its last chunk, which every first query of a rank may see."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.handoff import Arriving
from gecko.ops.chunk_attention import AttentionState
from gecko.ops.chunk_attention.pattern import Pattern
from gecko.ops.dtypes import compute_dtype
from gecko.segments import Segments


def give_last_chunk(x: Tensor, pattern: Pattern, segments: Segments) -> Arriving | None:
    """Send the last chunk of x (B, H, T, d) to the next rank; None where no rank needs it.

    Where windows do not look back, only the state does, and only that of a rank of one chunk: it keeps two.
    """
    needed = pattern.lookback > 0 or segments.length == pattern.chunk_size
    if segments.handoff is None or not needed:
        return None
    return segments.handoff.previous(x[:, :, -pattern.chunk_size :])


def state_before(
    state: AttentionState | None, keys: Arriving, values: Arriving, pattern: Pattern, segments: Segments
) -> AttentionState:
    """The state before this rank's first token, from the chunk that arrives; keys are not rotated yet."""
    key, value = keys.wait(), values.wait()
    key = pattern.rotate(key.to(compute_dtype(key)), torch.arange(pattern.chunk_size))
    half = (segments.clock.position // pattern.chunk_size + 1).to(value.device) % 2
    arrived = AttentionState(_ring(key, half), _ring(value, half))
    if state is None:
        return arrived
    return AttentionState(state.keys + arrived.keys, state.values + arrived.values)


def _ring(chunk: Tensor, half: Tensor) -> Tensor:
    """(B, H, 2c, d): each row's chunk in its half of the ring, zero in the other."""
    first = (half == 0).view(-1, 1, 1, 1)
    return torch.cat([chunk * first, chunk * ~first], dim=2)
