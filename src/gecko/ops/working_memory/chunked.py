"""Eager forms of the working memory: over whole chunks for rows with the same chunk offset, and for one token per row.

Over whole chunks, summaries of chunks are computed in parallel, a short chain of affine maps updates the memory, and
one batched product reads it. Batched products are the library's, with sums in float32.

With the context split over ranks, a rank needs from each earlier one the weights of its chunks, the summary of its last
one, and one affine map. No rank waits for the chain of another: each reduces its own chunks to M ← A M + B before it
receives anything, and the maps of all earlier ranks together give its initial memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.common import common_chunk_offset, padded
from gecko.ops.working_memory.rules import ChunkSummary, Rule, empty_summary
from gecko.segments import ContextExchange, Segments


@dataclass(frozen=True)
class Grid:
    """Grid of n chunks that covers a call. The first chunk has ``phase`` tokens of earlier calls before the call's own,
    and the last chunk ends with ``empty`` unused places.

    whole: every place of the grid holds a counted token.
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
    def build(cls, segments: Segments, phase: int, chunk_size: int) -> Grid:
        length = segments.length
        chunks = -(-(phase + length) // chunk_size)
        empty = chunks * chunk_size - phase - length
        starts = segments.document_starts - (segments.clock.position - phase).unsqueeze(1)
        last = ((torch.arange(chunks) + 1) * chunk_size - phase).clamp(max=length) - 1
        last_start = starts[:, last]
        place = phase + torch.arange(length)
        chunk = place // chunk_size
        counted = place >= last_start[:, chunk]
        allowed = starts < (chunk - 1) * chunk_size

        def on_grid(mask: Tensor) -> Tensor:
            padded = F.pad(mask, (phase, empty)).unflatten(1, (chunks, chunk_size))
            return padded[:, None, :, :, None].to(segments.device)

        resets = last_start >= torch.arange(chunks) * chunk_size
        continues = last_start[:, 0] < phase
        return cls(
            phase, chunks, empty, bool(counted.all()) and phase == empty == 0, on_grid(counted), on_grid(allowed),
            resets.to(segments.device), continues.to(segments.device),
        )  # fmt: skip

    def lay(self, x: Tensor) -> Tensor:
        """Reshape (B, H, T, d) to (B, H, n, c, d), with zeros in the places without tokens."""
        return padded(x, self.phase, self.empty).unflatten(2, (self.chunks, -1))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32 for batches of matrices of one dtype. Sums over 16-bit factors are not rounded."""
    if a.is_cuda and a.itemsize == 2:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


class _AffineChain(torch.autograd.Function):
    """Apply one map at a time to a contiguous tensor in cache, and copy each memory to the strided output."""

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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, memories = ctx.saved_tensors
        grad_b = torch.empty_like(memories)
        factors, grads, places = (x.flatten(0, 1).unbind(1) for x in (a, grad, grad_b))
        total = grad_last.flatten(0, 1)
        for i in range(len(factors) - 1, -1, -1):
            places[i].copy_(total)
            total = torch.baddbmm(grads[i], factors[i].mT, total)
        return grad_b @ memories.mT, grad_b, total.view(grad_last.shape)


def affine_chain(a: Tensor, b: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Compute M_{i+1} = A_i M_i + B_i from M_0 = ``initial``.

    Args:
        a: (B, H, n, key, key); b: (B, H, n, key, value); initial: (B, H, key, value).

    Returns:
        M_0 … M_{n−1}, (B, H, n, key, value), and M_n, (B, H, key, value).
    """
    return _AffineChain.apply(a, b, initial)


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


if TYPE_CHECKING:
    from gecko.ops.working_memory import WorkingMemoryState


def weights_before(
    rule: Rule, chunk_size: int, state: WorkingMemoryState, weights: Tensor, normalisers: Tensor, resets: Tensor,
    segments: Segments,
) -> tuple[WorkingMemoryState, Tensor]:  # fmt: skip
    """Add the normaliser before the previous chunk (the last one of the rank before), and its weight, to ``state``.

    Args:
        weights: (B, H, n, key) of this rank's chunks; normalisers: (B, H, n + 2, key), computed without other ranks.
        resets: (B, n + 1), first that of the previous chunk.

    Returns:
        The state, and ``resets`` with the correct value for the previous chunk.
    """
    exchange = segments.exchange
    assert exchange is not None
    arrived = exchange.earlier(torch.stack([normalisers[:, :, -2], weights[:, :, -1]], dim=2)).wait()
    reach = exchange.chunks_reach[:, :, None, :, None]
    arrived = torch.where(reach, arrived, rule.empty_weight)
    normaliser = state.normaliser
    for i in range(len(arrived) - 1, -1, -1):
        normaliser = rule.accumulate(normaliser, arrived[i, :, :, 0])
        if i > 0:
            normaliser = rule.accumulate(normaliser, arrived[i, :, :, 1])
    previous = replace(state.previous, weight=rule.accumulate(state.previous.weight, arrived[0, :, :, 1]))
    state = replace(state, normaliser=normaliser, previous=previous)
    if exchange.first:
        return state, resets
    began = segments.clock.document_start >= segments.clock.position - chunk_size
    return state, torch.cat([began.to(resets.device).unsqueeze(1), resets[:, 1:]], dim=1)


def summary_before(previous: ChunkSummary, last: ChunkSummary, exchange: ContextExchange) -> ChunkSummary:
    """Send the sums of this rank's ``last`` chunk to the next rank, and add the received ones to ``previous``."""
    arrived = exchange.previous(torch.cat([last.key_sum, last.value_sum], dim=-1)).wait()
    key_sum, value_sum = arrived.split([last.key_sum.shape[-1], last.value_sum.shape[-1]], dim=-1)
    return ChunkSummary(previous.weight, previous.key_sum + key_sum, previous.value_sum + value_sum)


def affine_chain_of_ranks(exchange: ContextExchange, a: Tensor, b: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``affine_chain`` starting from the result of all earlier ranks. ``initial`` is zero except on rank 0."""
    key_dim, value_dim = a.shape[-1], initial.shape[-1]
    identity = torch.eye(key_dim, dtype=a.dtype, device=a.device).expand(*initial.shape[:2], -1, -1)
    maps, whole = affine_chain(a, torch.cat([torch.zeros_like(a), b], dim=-1), torch.cat([identity, initial], dim=-1))
    arrived = exchange.earlier(whole).wait()
    memory = torch.zeros_like(initial)
    for i in range(len(arrived) - 1, -1, -1):
        factor, term = arrived[i].split([key_dim, value_dim], dim=-1)
        memory = factor @ memory + term
    (factors, terms), (factor, term) = (x.split([key_dim, value_dim], dim=-1) for x in (maps, whole))
    return terms + factors @ memory.unsqueeze(2), term + factor @ memory


if TYPE_CHECKING:
    from gecko.ops.working_memory import WorkingMemoryState


def working_memory_chunked(
    rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    """Compute ``working_memory`` for rows with the same chunk offset.

    The previous chunk enters the memory first, then all chunks of the grid except the last: a chunk can be read two
    chunks later. ``memories[:, :, i]`` is the memory that chunk i of the grid reads.
    """
    phase = common_chunk_offset(segments, chunk_size)
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
    if segments.exchange is not None:
        state, resets = weights_before(rule, chunk_size, state, whole, normalisers, resets, segments)
        normalisers = normalisers_of(rule, state, whole, resets)
    before = torch.where(grid.resets[:, None, :, None], rule.empty_weight, normalisers[:, :, 1:-1])
    summaries = rule.summarise(k, v, counted, weights, before)
    if segments.exchange is not None:
        state = replace(state, previous=summary_before(state.previous, _slice(summaries, -1), segments.exchange))
    entering, left = _enter(rule, state.previous, current, summaries)

    a, b = rule.affine(entering, normalisers[:, :, 1:-1])
    a = a.masked_fill(resets[:, None, :-1, None, None], 0)
    chain = affine_chain if segments.exchange is None else partial(affine_chain_of_ranks, segments.exchange)
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
    first = rule.merge(current, _slice(chunks, 0))
    parts = zip(previous.tensors().values(), first.tensors().values(), chunks.tensors().values(), strict=True)
    entering, before_last, last = zip(*(_entering(*part) for part in parts), strict=True)
    return ChunkSummary(*entering), (ChunkSummary(*before_last), ChunkSummary(*last))


def _entering(previous: Tensor, first: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = chunks.shape[2]
    if count == 1:  # clone: decoding overwrites a state in place, so no other tensor may share its memory
        return previous.unsqueeze(2), previous.clone(), first
    # split instead of slices: the gradient of a slice is as large as the tensor that it was taken from.
    _, middle, last = chunks.split([1, count - 2, 1], dim=2)
    entering = torch.cat([previous.unsqueeze(2), first.unsqueeze(2), middle], dim=2)
    return entering, middle[:, :, -1] if count > 2 else first, last.squeeze(2)


def _slice(summary: ChunkSummary, index: int | slice) -> ChunkSummary:
    return summary.map(lambda x: x[:, :, index])


if TYPE_CHECKING:
    from gecko.ops.working_memory import WorkingMemoryState


def working_memory_step(
    rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    """Compute ``working_memory`` for one token per row. If the token completes its chunk, the previous chunk enters."""
    q, k, v = inputs
    token = segments.shared(("memory", chunk_size), lambda: _Token.of(segments, chunk_size))
    out = rule.read(q, token.allowed, state.memory, state.normaliser)

    current = state.current
    if segments.starts is not None:
        nothing = empty_summary(rule, q.shape[:2], q.shape[-1], v.shape[-1], q.dtype, q.device)
        current = current.where(segments.continues[:, 0], nothing)

    def before() -> Tensor:
        return torch.where(token.began_here.view(-1, 1, 1), rule.empty_weight, _with_previous(rule, state))

    current = rule.add(current, k, v, before, segments.overwrites)
    after = type(state)(state.memory, state.normaliser, state.previous, current, state.previous_resets)
    return out, after if token.completes is None else _complete_chunk(rule, after, token, segments.overwrites)


@dataclass(frozen=True)
class _Token:
    """Flags of one token per row, which follow from its position. They are the same in all layers."""

    began_here: Tensor
    """(B,) bool: the token's document started in the token's chunk."""
    allowed: Tensor
    """(B, 1, 1, 1) bool: the token may read, because its document started before the previous chunk."""
    completes: Tensor | None
    """Indices of the rows in which the token completes its chunk; None if there are none."""

    @classmethod
    def of(cls, segments: Segments, chunk_size: int) -> _Token:
        position, start = segments.clock.position, segments.document_starts[:, 0]
        chunk_start = position - position % chunk_size
        began_here, allowed = (start >= chunk_start), (start < chunk_start - chunk_size)
        completes = ((position + 1) % chunk_size == 0).nonzero().flatten()
        return cls(
            began_here.to(segments.device), allowed.to(segments.device).view(-1, 1, 1, 1),
            completes.to(segments.device) if len(completes) else None,
        )  # fmt: skip


def _complete_chunk(rule: Rule, state: WorkingMemoryState, token: _Token, overwrites: bool) -> WorkingMemoryState:
    """In rows with a complete chunk, enter the previous chunk into the memory and start an empty current chunk."""
    rows = token.completes
    assert rows is not None, "there must be such rows"
    done = state.map(lambda x: x.index_select(0, rows))
    normaliser = _with_previous(rule, done)
    key_sum, value_sum = done.current.key_sum, done.current.value_sum
    nothing = empty_summary(
        rule, key_sum.shape[:2], key_sum.shape[-1], value_sum.shape[-1], key_sum.dtype, key_sum.device
    )
    changed = type(state)(
        _enter_previous(rule, done, normaliser), normaliser, done.current, nothing,
        token.began_here.index_select(0, rows),
    )  # fmt: skip
    put = Tensor.index_copy_ if overwrites else Tensor.index_copy
    new = iter(changed.tensors().values())
    return state.map(lambda x: put(x, 0, rows, next(new)))


def _with_previous(rule: Rule, state: WorkingMemoryState) -> Tensor:
    both = rule.accumulate(state.normaliser, state.previous.weight)
    return torch.where(state.previous_resets.view(-1, 1, 1), state.previous.weight, both)


def _enter_previous(rule: Rule, state: WorkingMemoryState, after: Tensor) -> Tensor:
    a, b = rule.affine(state.previous, after)
    return a.masked_fill(state.previous_resets.view(-1, 1, 1, 1), 0) @ state.memory + b
