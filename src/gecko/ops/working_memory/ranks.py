"""What the memory needs of earlier ranks' chunks: their weights, the last one's summary, and one affine map each.

No rank waits for another rank's chain: each reduces its own chunks to M ← A M + B before anything arrives, and
the maps of all earlier ranks together give the memory that it starts from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gecko.handoff import Handoff
from gecko.ops.working_memory.chain import affine_chain
from gecko.ops.working_memory.rules import ChunkSummary, Rule
from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.working_memory import WorkingMemoryState


def weights_before(
    rule: Rule, chunk_size: int, state: WorkingMemoryState, weights: Tensor, normalisers: Tensor, resets: Tensor,
    segments: Segments,
) -> tuple[WorkingMemoryState, Tensor]:  # fmt: skip
    """``state`` with the normaliser before this rank's first chunk but one and the weight of the one before it.

    Args:
        weights: (B, H, n, key) of this rank's chunks; normalisers: (B, H, n + 2, key), from ``state`` alone.
        resets: (B, n + 1), the previous chunk's first.

    Returns:
        The state, and ``resets`` with the previous chunk's set.
    """
    handoff = segments.handoff
    assert handoff is not None
    arrived = handoff.earlier(torch.stack([normalisers[:, :, -2], weights[:, :, -1]], dim=2)).wait()
    reach = handoff.chunks_reach[:, :, None, :, None]
    arrived = torch.where(reach, arrived, rule.empty_weight)
    normaliser = state.normaliser
    for i in range(len(arrived) - 1, -1, -1):
        normaliser = rule.accumulate(normaliser, arrived[i, :, :, 0])
        if i > 0:
            normaliser = rule.accumulate(normaliser, arrived[i, :, :, 1])
    previous = replace(state.previous, weight=rule.accumulate(state.previous.weight, arrived[0, :, :, 1]))
    state = replace(state, normaliser=normaliser, previous=previous)
    if handoff.first:
        return state, resets
    began = segments.clock.document_start >= segments.clock.position - chunk_size
    return state, torch.cat([began.to(resets.device).unsqueeze(1), resets[:, 1:]], dim=1)


def summary_before(previous: ChunkSummary, last: ChunkSummary, handoff: Handoff) -> ChunkSummary:
    """``previous``, whose weight is known, with the sums of the rank before's ``last`` chunk."""
    arrived = handoff.previous(torch.cat([last.key_sum, last.value_sum], dim=-1)).wait()
    key_sum, value_sum = arrived.split([last.key_sum.shape[-1], last.value_sum.shape[-1]], dim=-1)
    return ChunkSummary(previous.weight, previous.key_sum + key_sum, previous.value_sum + value_sum)


def affine_chain_of_ranks(handoff: Handoff, a: Tensor, b: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """``affine_chain`` from what all earlier ranks' chains come to; ``initial`` is zero but on rank 0."""
    key_dim, value_dim = a.shape[-1], initial.shape[-1]
    identity = torch.eye(key_dim, dtype=a.dtype, device=a.device).expand(*initial.shape[:2], -1, -1)
    maps, whole = affine_chain(a, torch.cat([torch.zeros_like(a), b], dim=-1), torch.cat([identity, initial], dim=-1))
    arrived = handoff.earlier(whole).wait()
    memory = torch.zeros_like(initial)
    for i in range(len(arrived) - 1, -1, -1):
        factor, term = arrived[i].split([key_dim, value_dim], dim=-1)
        memory = factor @ memory + term
    (factors, terms), (factor, term) = (x.split([key_dim, value_dim], dim=-1) for x in (maps, whole))
    return terms + factors @ memory.unsqueeze(2), term + factor @ memory
