"""Working memory over whole chunks, rows in step: summaries in parallel, a short chain, one batched read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gecko.ops.phases import common_phase
from gecko.ops.working_memory.chain import affine_chain, segmented_scan
from gecko.ops.working_memory.grid import Grid
from gecko.ops.working_memory.ranks import affine_chain_of_ranks, summary_before, weights_before
from gecko.ops.working_memory.rules import ChunkSummary, Rule, empty_summary
from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.working_memory import WorkingMemoryState


def remember_chunks(
    rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    """``working_memory`` for rows that agree on position mod c.

    The chain enters the previous chunk first, then those of the grid but the last: a chunk is read two
    chunks later. ``entered[i]`` is the i-th of them; ``memories[i]`` what chunk i of the grid reads.
    """
    phase = common_phase(segments, chunk_size)
    assert phase is not None, "rows must agree on their phase"
    grid = segments.shared(("memory", chunk_size), lambda: Grid.build(segments, phase, chunk_size))
    q, k, v = (grid.lay(x) for x in inputs)

    nothing = empty_summary(rule, q.shape[:2], q.shape[-1], v.shape[-1], q.dtype, q.device)
    current = state.current.where(grid.continues, nothing)
    counted = None if grid.whole else grid.counted
    weights = rule.weigh(k, counted)
    whole = torch.cat([rule.accumulate(current.weight, weights[:, :, 0]).unsqueeze(2), weights[:, :, 1:]], dim=2)
    resets = torch.cat([state.previous_resets.unsqueeze(1), grid.resets], dim=1)
    normalisers = normalisers_of(rule, state, whole, resets)
    if segments.handoff is not None:
        state, resets = weights_before(rule, chunk_size, state, whole, normalisers, resets, segments)
        normalisers = normalisers_of(rule, state, whole, resets)
    before = torch.where(grid.resets[:, None, :, None], rule.empty_weight, normalisers[:, :, 1:-1])
    summaries = rule.summarise(k, v, counted, weights, before)
    if segments.handoff is not None:
        state = replace(state, previous=summary_before(state.previous, _slice(summaries, -1), segments.handoff))
    entering, left = _enter(rule, state.previous, current, summaries)

    a, b = rule.affine(entering, normalisers[:, :, 1:-1])
    a = a.masked_fill(resets[:, None, :-1, None, None], 0)
    chain = affine_chain if segments.handoff is None else partial(affine_chain_of_ranks, segments.handoff)
    memories, last = chain(a, b, state.memory)
    out = rule.read(q, grid.allowed, memories, normalisers[:, :, :-2])

    end = (phase + segments.length) // chunk_size
    completed = end == grid.chunks
    after = type(state)(
        last if completed else memories[:, :, end], normalisers[:, :, end], left[completed],
        nothing if completed else left[1], resets[:, end],
    )  # fmt: skip
    return out.flatten(2, 3)[:, :, phase : phase + segments.length], after


def normalisers_of(rule: Rule, state: WorkingMemoryState, weights: Tensor, resets: Tensor) -> Tensor:
    """(B, H, n + 2, key): before the previous chunk, after it, and after each chunk of the grid."""
    all_weights = torch.cat([state.normaliser.unsqueeze(2), state.previous.weight.unsqueeze(2), weights], dim=2)
    index = torch.arange(1, all_weights.shape[2], device=resets.device)
    first = torch.where(resets, index, 0).cummax(dim=1).values
    return segmented_scan(rule.accumulate, all_weights, torch.cat([torch.zeros_like(first[:, :1]), first], dim=1))


def _enter(
    rule: Rule, previous: ChunkSummary, current: ChunkSummary, chunks: ChunkSummary
) -> tuple[ChunkSummary, tuple[ChunkSummary, ChunkSummary]]:
    """Of the previous chunk and the grid's n, the first of these completed by its earlier tokens: the first n, which
    the chain enters, (B, H, n, …), and the last two."""
    first = rule.merge(current, _slice(chunks, 0))
    parts = zip(previous.tensors().values(), first.tensors().values(), chunks.tensors().values(), strict=True)
    entering, before_last, last = zip(*(_entering(*part) for part in parts), strict=True)
    return ChunkSummary(*entering), (ChunkSummary(*before_last), ChunkSummary(*last))


def _entering(previous: Tensor, first: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = chunks.shape[2]
    if count == 1:  # a copy: where decoding overwrites a state, no other may lie in the same memory
        return previous.unsqueeze(2), previous.clone(), first
    # Parts, not slices: the gradient of a slice is as large as what it was cut from.
    _, middle, last = chunks.split([1, count - 2, 1], dim=2)
    entering = torch.cat([previous.unsqueeze(2), first.unsqueeze(2), middle], dim=2)
    return entering, middle[:, :, -1] if count > 2 else first, last.squeeze(2)


def _slice(summary: ChunkSummary, index: int | slice) -> ChunkSummary:
    return summary.map(lambda x: x[:, :, index])
