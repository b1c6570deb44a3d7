"""Eager forms of the working memory: over whole chunks for rows with the same chunk offset, and for one token per row.

Over whole chunks, summaries of chunks are computed in parallel, a short chain of affine maps updates the memory, and
one batched product reads it. Batched products are the library's, with sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import common_chunk_offset, padded
from gecko.ops.working_memory.rules import (
    ChunkSummary,
    Entered,
    Orthogonal,
    Rule,
    WorkingMemoryState,
    empty_summary,
    with_identity,
)
from gecko.runtime.tensors import to_device
from gecko.segments import Segments


@dataclass(frozen=True)
class Grid:
    """Grid of n chunks that covers a call. The first chunk has ``phase`` tokens of earlier calls before the call's own,
    and the last chunk ends with ``empty`` unused places.

    whole: every place of the grid holds a counted token, whatever the documents are.
    counted: (B, 1, n, c, 1) bool, tokens of the call that belong to the last document of their chunk (so far).
    allowed: (B, 1, n, c, 1) bool, tokens that may read: their document started before the previous chunk.
    resets: (B, n) bool, the document at the end of the chunk (so far) started in that chunk.
    continues: (B,) bool, the document at the end of the first chunk started before the call.
    """

    phase: int
    chunks: int
    empty: int
    whole: bool
    counted: Tensor
    allowed: Tensor
    resets: Tensor
    continues: Tensor

    @classmethod
    def of(cls, segments: Segments, chunk_size: int) -> Grid:
        """Return the grid of a call whose rows have the same chunk offset. It is computed once for all layers."""
        phase = common_chunk_offset(segments, chunk_size)
        assert phase is not None, "rows must agree on their phase"
        return segments.shared(("memory", chunk_size), lambda given: cls.build(given, phase, chunk_size))

    @classmethod
    def build(cls, segments: Segments, phase: int, chunk_size: int) -> Grid:
        length = segments.length
        chunks = -(-(phase + length) // chunk_size)
        empty = chunks * chunk_size - phase - length
        starts = segments.document_starts - (segments.clock.position - phase).unsqueeze(1)
        last = ((torch.arange(chunks, device="cpu") + 1) * chunk_size - phase).clamp(max=length) - 1
        last_start = starts[:, last]
        place = phase + torch.arange(length, device="cpu")
        chunk = place // chunk_size
        counted = place >= last_start[:, chunk]
        allowed = starts < (chunk - 1) * chunk_size

        def on_grid(mask: Tensor) -> Tensor:
            padded = F.pad(mask, (phase, empty)).unflatten(1, (chunks, chunk_size))
            return to_device(padded[:, None, :, :, None], segments.device)

        # Without a document start every token of the call belongs to the last document of its chunk. With one it may be
        # so too, but a captured step must not depend on that.
        whole = phase == empty == 0 and segments.starts is None
        resets = last_start >= torch.arange(chunks, device="cpu") * chunk_size
        continues = last_start[:, 0] < phase
        return cls(
            phase, chunks, empty, whole, on_grid(counted), on_grid(allowed), to_device(resets, segments.device),
            to_device(continues, segments.device),
        )  # fmt: skip

    def lay(self, x: Tensor) -> Tensor:
        """Reshape (B, H, T, d) to (B, H, n, c, d), with zeros in the places without tokens."""
        return padded(x, self.phase, self.empty).unflatten(2, (self.chunks, -1))

    def unlay(self, x: Tensor) -> Tensor:
        """Return the places with tokens of x (B, H, n, c, d), as (B, H, T, d)."""
        x = x.flatten(2, 3)
        return x[:, :, self.phase : x.shape[2] - self.empty]


class AffineChain(FirstOrder):
    """Compute M_{i+1} = A_i M_i + B_i from M_0 = ``initial``, one map at a time on a contiguous tensor in cache.

    a: (B, H, n, key, key); b: (B, H, n, key, value); initial: (B, H, key, value). Returns M_0 … M_{n−1}, (B, H, n, key,
    value), and M_n, (B, H, key, value).
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        memories = torch.empty_like(b, memory_format=torch.contiguous_format)
        factors, terms, places = (x.flatten(0, 1).unbind(1) for x in (a, b, memories))
        memory = initial.flatten(0, 1)
        for factor, term, place in zip(factors, terms, places, strict=True):
            place.copy_(memory)
            memory = torch.baddbmm(term, factor, memory)
        ctx.save_for_backward(a, memories)
        return memories, memory.view(initial.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, memories = ctx.saved_tensors
        grad_b = torch.empty_like(memories)
        factors, grads, places = (x.flatten(0, 1).unbind(1) for x in (a, grad, grad_b))
        total = grad_last.flatten(0, 1)
        for i in range(len(factors) - 1, -1, -1):
            places[i].copy_(total)
            total = torch.baddbmm(grads[i], factors[i].mT, total)
        return grad_b @ memories.mT, grad_b, total.view(grad_last.shape)


def segmented_scan(combine: Callable[[Tensor, Tensor], Tensor], x: Tensor, first: Tensor) -> Tensor:
    """Return the inclusive scan over x_{first_i}, …, x_i for each i, in log₂ n steps.

    Args:
        combine: associative, on tensors (B, H, m, key); x: (B, H, n, key); first: (B, n) int64.
    """
    index, shift = torch.arange(x.shape[2], device=x.device), 1
    while shift < x.shape[2]:
        reaches = (index - shift >= first)[:, None, shift:, None]
        later = torch.where(reaches, combine(x[:, :, shift:], x[:, :, :-shift]), x[:, :, shift:])
        x = torch.cat([x[:, :, :shift], later], dim=2)
        shift *= 2
    return x


def working_memory_by_chunk(
    rule: Orthogonal, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    """Compute ``working_memory`` for a rule whose written values depend on the memory before their chunk."""

    def chunks(segments: Segments) -> list[tuple[slice, Segments]]:
        """Return the parts of the call that lie in one chunk each, and their layouts."""
        phase, length = common_chunk_offset(segments, chunk_size), segments.length
        assert phase is not None, "rows must agree on their phase"
        borders = [0, *range(chunk_size - phase, length, chunk_size), length]
        return [(slice(begin, end), segments.part(begin, end)) for begin, end in pairwise(borders)]

    outputs = []
    for part, here in segments.shared(("chunks", chunk_size), chunks):
        q, k, v = (x[:, :, part] for x in inputs)
        v = rule.written(k, v, _memory_before(rule, state, Grid.of(here, chunk_size).resets[:, 0]))
        out, state = enter_chunked(rule, chunk_size, (q, k, v), state, here).read(state.memory)
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


def _memory_before(rule: Rule, state: WorkingMemoryState, begun: Tensor) -> Tensor:
    """Return the memory before the current chunk enters, zero in rows whose document has ``begun`` (B,) in it."""
    state = state.map(lambda x: x.contiguous())  # so that equal states give equal bits, however they are stored
    return _enter_previous(rule, state, _with_previous(rule, state)).masked_fill(begun.view(-1, 1, 1, 1), 0)


def enter_chunked(
    rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> Entered:
    """Summarise the chunks of rows with the same chunk offset.

    The previous chunk enters the memory first, then all chunks of the grid except the last: a chunk can be read two
    chunks later. The i-th memory of the chain is the one that chunk i of the grid reads.
    """
    grid, nothing = Grid.of(segments, chunk_size), empty_summary(rule, state.memory)
    q, k, v = (grid.lay(x) for x in inputs)
    current = state.current.where(grid.continues, nothing)
    counted = None if grid.whole else grid.counted
    weights = rule.weigh(k, counted)
    whole = torch.cat([rule.accumulate(current.weight, weights[:, :, 0]).unsqueeze(2), weights[:, :, 1:]], dim=2)
    resets = torch.cat([state.previous_resets.unsqueeze(1), grid.resets], dim=1)
    normalisers = normalisers_of(rule, state, whole, resets)
    before = torch.where(grid.resets[:, None, :, None], rule.empty_weight, normalisers[:, :, 1:-1])
    entering, left = _enter(rule, state.previous, current, rule.summarise(k, v, counted, weights, before))
    a, b = rule.affine(entering, normalisers[:, :, 1:-1])
    a = a.masked_fill(resets[:, None, :-1, None, None], 0)

    def affine_map() -> Tensor:
        return AffineChain.apply(a, *with_identity(b, state.memory))[1]

    def read(memory: Tensor) -> tuple[Tensor, WorkingMemoryState]:
        memories, last = AffineChain.apply(a, b, memory)
        out = rule.read(q, grid.allowed, memories, normalisers[:, :, :-2])
        end, completed = grid.chunks - (grid.empty > 0), grid.empty == 0
        after = type(state)(
            last if completed else memories[:, :, end], normalisers[:, :, end], left[completed],
            nothing if completed else left[1], resets[:, end],
        )  # fmt: skip
        return grid.unlay(out), after

    return Entered(affine_map, read)


def normalisers_of(rule: Rule, state: WorkingMemoryState, weights: Tensor, resets: Tensor) -> Tensor:
    """Return the normalisers (B, H, n + 2, key) before and after the previous chunk, and after each grid chunk."""
    all_weights = torch.cat([state.normaliser.unsqueeze(2), state.previous.weight.unsqueeze(2), weights], dim=2)
    index = torch.arange(1, all_weights.shape[2], device=resets.device)
    first = torch.where(resets, index, 0).cummax(dim=1).values
    return segmented_scan(rule.accumulate, all_weights, torch.cat([torch.zeros_like(first[:, :1]), first], dim=1))


def _enter(
    rule: Rule, previous: ChunkSummary, current: ChunkSummary, chunks: ChunkSummary
) -> tuple[ChunkSummary, tuple[ChunkSummary, ChunkSummary]]:
    """Return the chunks that enter the memory, (B, H, n, …): the previous one and all of the grid but the last. Also
    return the last two of all. ``current`` has the earlier tokens of the grid's first chunk."""
    first = rule.merge(current, chunks.map(lambda x: x[:, :, 0]))
    parts = zip(previous.tensors().values(), first.tensors().values(), chunks.tensors().values(), strict=True)
    entering, before_last, last = zip(*(_entering(*part) for part in parts), strict=True)
    return ChunkSummary(*entering), (ChunkSummary(*before_last), ChunkSummary(*last))


def _entering(previous: Tensor, first: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = chunks.shape[2]
    if count == 1:
        return previous.unsqueeze(2), previous, first
    # split instead of slices: the gradient of a slice is as large as the tensor that it was taken from.
    _, middle, last = chunks.split([1, count - 2, 1], dim=2)
    entering = torch.cat([previous.unsqueeze(2), first.unsqueeze(2), middle], dim=2)
    return entering, middle[:, :, -1] if count > 2 else first, last.squeeze(2)


def working_memory_step(
    rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    """Compute ``working_memory`` for one token per row. If the token completes its chunk, the previous chunk enters."""
    q, k, v = inputs
    token = segments.shared(("memory", chunk_size), lambda given: _MemoryToken.of(given, chunk_size))
    out = rule.read(q, token.allowed, state.memory, state.normaliser)

    current = state.current
    if segments.starts is not None:
        current = current.where(segments.continues[:, 0], empty_summary(rule, state.memory))

    if isinstance(rule, Orthogonal):
        v = rule.written(k, v, _memory_before(rule, state, token.began_here))

    def before() -> Tensor:
        return torch.where(token.began_here.view(-1, 1, 1), rule.empty_weight, _with_previous(rule, state))

    current = rule.add(current, k, v, before)
    after = type(state)(state.memory, state.normaliser, state.previous, current, state.previous_resets)
    if torch.compiler.is_exporting():
        return out, _complete_chunk_if(rule, after, token, (segments.clock.position + 1) % chunk_size == 0)
    if (rows := token.completes) is None:
        return out, after
    done = after.map(lambda x: x.index_select(0, rows))
    changed = _with_complete_chunk(rule, done, token.began_here.index_select(0, rows))
    new = iter(changed.tensors().values())
    return out, after.map(lambda x: x.index_copy(0, rows, next(new)))


@dataclass(frozen=True)
class _MemoryToken:
    """Flags of one token per row, which follow from its position. They are the same in all layers."""

    began_here: Tensor
    """(B,) bool: the token's document started in the token's chunk."""
    allowed: Tensor
    """(B, 1, 1, 1) bool: the token may read, because its document started before the previous chunk."""
    completes: Tensor | None
    """Indices of the rows in which the token completes its chunk; None if there are none."""

    @classmethod
    def of(cls, segments: Segments, chunk_size: int) -> _MemoryToken:
        position, start = segments.clock.position, segments.document_starts[:, 0]
        chunk_start = position - position % chunk_size
        began_here, allowed = (start >= chunk_start), (start < chunk_start - chunk_size)
        began_here, allowed = began_here.to(segments.device), allowed.to(segments.device).view(-1, 1, 1, 1)
        if torch.compiler.is_exporting():  # the graph decides at each token
            return cls(began_here, allowed, None)
        completes = ((position + 1) % chunk_size == 0).nonzero().flatten()
        return cls(began_here, allowed, completes.to(segments.device) if len(completes) else None)


def _with_complete_chunk(rule: Rule, done: WorkingMemoryState, began_here: Tensor) -> WorkingMemoryState:
    """Enter the previous chunk into the memory and start an empty current chunk, in all rows."""
    normaliser = _with_previous(rule, done)
    memory, nothing = _enter_previous(rule, done, normaliser), empty_summary(rule, done.memory)
    return type(done)(memory, normaliser, done.current, nothing, began_here)


def _complete_chunk_if(
    rule: Rule, state: WorkingMemoryState, token: _MemoryToken, wanted: Tensor
) -> WorkingMemoryState:
    """Complete the chunk of the only row if ``wanted`` (1,), by an operation that ``torch.export`` can trace."""

    def filled(tensors: Iterable[Tensor]) -> WorkingMemoryState:
        parts = iter(tensors)
        return state.map(lambda _: next(parts))

    def complete(began_here: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        changed = _with_complete_chunk(rule, filled(tensors), began_here)
        return tuple(x.clone() for x in changed.tensors().values())  # a branch may not return its inputs

    def keep(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in tensors)

    return filled(torch.cond(wanted[0], complete, keep, (token.began_here, *state.tensors().values())))


def _with_previous(rule: Rule, state: WorkingMemoryState) -> Tensor:
    both = rule.accumulate(state.normaliser, state.previous.weight)
    return torch.where(state.previous_resets.view(-1, 1, 1), state.previous.weight, both)


def _enter_previous(rule: Rule, state: WorkingMemoryState, after: Tensor) -> Tensor:
    a, b = rule.affine(state.previous, after)
    return a.masked_fill(state.previous_resets.view(-1, 1, 1, 1), 0) @ state.memory + b
