"""Working memory by C kernels, for the adaptive rule: summarise the chunks, run the chain of updates, read the memory.

Counted tokens are always the last ones of their chunk, and allowed tokens the first ones. The kernels therefore take
counts instead of masks, and no padding. All summaries are in one tensor, in the order in which they enter the memory:
slot 0 is the chunk before the call, slot i + 1 is chunk i of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, save, saved
from gecko.ops.working_memory.chunked import Grid
from gecko.ops.working_memory.rules import ChunkSummary, Entered, Rule, WorkingMemoryState, empty_summary, with_identity
from gecko.segments import Segments


def enter_cpu(
    rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> Entered:
    """Summarise the chunks of rows with the same chunk offset. The kernels do so for the map and for the reads."""
    grid = Grid.of(segments, chunk_size)
    spans = segments.shared(("memory spans", chunk_size), lambda given: Spans.of(given, chunk_size))
    resets = torch.cat([state.previous_resets.unsqueeze(1), grid.resets], dim=1).to(torch.bool)

    def affine_map() -> Tensor:
        _, k, v = inputs
        assert not grid.phase, "the call must start at a chunk boundary"
        v, identity = with_identity(v, state.memory)
        value_sum, _ = with_identity(state.previous.value_sum, state.memory)
        previous = state.previous.weight, state.previous.key_sum, value_sum
        return WorkingMemoryCPU.apply(spans, resets, None, k, v, identity, state.normaliser, *previous)[1]

    def read(memory: Tensor) -> tuple[Tensor, WorkingMemoryState]:
        nothing = empty_summary(rule, memory)
        earlier = state.current.where(grid.continues, nothing).tensors().values() if grid.phase else ()
        out, memory, normaliser, *sums = WorkingMemoryCPU.apply(
            spans, resets, *inputs, memory, state.normaliser, *state.previous.tensors().values(), *earlier
        )
        previous, current = ChunkSummary(*sums[:3]), ChunkSummary(*sums[3:]) if sums[3:] else nothing
        if segments.ends is not None:
            current = current.where((spans.phase + segments.ends) % chunk_size != 0, nothing)
        last = resets.gather(1, spans.row_steps.unsqueeze(1)).squeeze(1)
        return out, type(state)(memory, normaliser, previous, current, last)

    return Entered(affine_map, read)


@dataclass(frozen=True)
class Spans:
    """Position of the call on the grid of n chunks; the first chunk holds ``phase`` tokens of earlier calls.

    steps: number of chunks that the call completes, n or n − 1. The chain enters the same number of slots. Of a padded
        call, it is that of a row without padding, and ``row_steps`` (B,) int64 has those of the rows.
    ends: (B,) int64, tokens of each row before its padding; None: there is no padding.
    counted, allowed: (B, n) int64, number of counted tokens (the last ones of the call in each chunk) and of allowed
        tokens (the first ones); see ``Grid``.
    """

    chunk_size: int
    phase: int
    chunks: int
    steps: int
    row_steps: Tensor
    ends: Tensor | None
    counted: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, segments: Segments, chunk_size: int) -> Spans:
        grid = Grid.of(segments, chunk_size)
        counted, allowed = (mask.sum((1, 3, 4)) for mask in (grid.counted, grid.allowed))
        phase, chunks, ends = grid.phase, grid.chunks, segments.ends
        if ends is None:
            row_steps = torch.full((segments.batch,), (phase + segments.length) // chunk_size, device="cpu")
        else:
            row_steps = (phase + ends) // chunk_size
            begins = (torch.arange(chunks, device="cpu") * chunk_size - phase).clamp(min=0)
            inside = (ends.unsqueeze(1) - begins).clamp(min=0)
            counted, allowed = counted.minimum(inside), allowed.minimum(inside)
        steps = (phase + segments.length) // chunk_size
        return cls(chunk_size, phase, chunks, steps, row_steps, ends, counted, allowed)

    def sizes(self, k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return the last arguments of every kernel."""
        return *k.shape, v.shape[-1], self.chunk_size, self.phase, self.chunks


class WorkingMemoryCPU(CFunction):
    """Return the outputs, the memory and the normaliser after the call, and the summary of the last complete chunk.

    If the call ends within a chunk or is padded, the summary of the chunk in which each row ends follows. Without q,
    nothing is read.
    """

    @staticmethod
    def forward(ctx: Any, spans: Spans, resets: Tensor, q: Tensor | None, *given: Tensor) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        q = None if q is None else q.contiguous()
        k, v, memory, normaliser, *summaries = (x.contiguous() for x in given)
        previous, earlier = summaries[:3], summaries[3:]
        sizes, chunks = spans.sizes(k, v), spans.chunks
        sums = [x.new_empty(*x.shape[:2], chunks + 1, *x.shape[2:]) for x in previous]
        for slots, before in zip(sums, previous, strict=True):
            slots[:, :, 0] = before
        call(
            "working_memory_summarise", k, v, spans.ends, spans.counted, *(earlier or (None, None, None)), *sums, *sizes
        )
        rho, share = (k.new_empty(*normaliser.shape[:2], chunks, normaliser.shape[2]) for _ in range(2))
        memories = v.new_empty(*memory.shape[:2], chunks, *memory.shape[2:])
        after, out = (torch.empty_like(memory), torch.empty_like(normaliser)), None
        call(
            "working_memory_chain", *sums, resets.view(torch.uint8), normaliser, memory, rho, share, memories, after[1],
            after[0], spans.row_steps, *sizes,
        )  # fmt: skip
        if q is not None:
            out = torch.empty_like(v)
            call("working_memory_read", q, memories, spans.allowed, out, *sizes)
        ctx.spans = spans
        save(ctx, q, k, v, resets, memories, rho, share, *sums, *earlier)
        if spans.ends is not None:
            ends, row = (spans.row_steps, (spans.row_steps + 1).clamp(max=chunks)), torch.arange(len(k), device="cpu")
            return out, *after, *(x[row, :, end] for end in ends for x in sums)
        return out, *after, *(_at(x, slot) for slot in range(spans.steps, chunks + 1) for x in sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads_after: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, resets, memories, rho, share, *sums = saved(ctx)
        sums, earlier, spans = sums[:3], sums[3:], ctx.spans
        sizes = spans.sizes(k, v)
        # Without gradients of the state, only the memories that this call reads have gradients.
        of_state = any(x is not None for x in grads_after)
        steps, live = (spans.steps, spans.chunks + 1) if of_state else (spans.chunks - 1, spans.chunks - 1)
        grad_memory, grad_normaliser, *grads_left = _whole(grads_after, sums) if of_state else (None, None)

        grad_q, grad_k, grad_v = (None if x is None else torch.empty_like(x) for x in (q, k, v))
        grads = [torch.empty_like(x) for x in sums]
        if q is None:
            grads[2].zero_()
        else:
            grad = torch.zeros_like(v) if grad is None else grad
            call("working_memory_read_backward", q, memories, grad, spans.allowed, grad_q, grads[2], *sizes)
        before = torch.empty_like(memories[:, :, 0]), torch.empty_like(rho[:, :, 0])
        call(
            "working_memory_chain_backward", *sums[1:], memories, rho, share, resets.view(torch.uint8), grad_memory,
            grad_normaliser, grads[2], *grads[:2], *before, steps, *sizes,
        )  # fmt: skip
        for i, left in enumerate(grads_left):
            grads[i % 3][:, :, spans.steps + i // 3] = left
        call("working_memory_summarise_backward", k, v, spans.counted, *sums, *grads, grad_k, grad_v, live, *sizes)
        by_previous = [_at(x, 0) for x in grads] if live else [None] * 3
        return None, None, grad_q, grad_k, grad_v, *before, *by_previous, *_of_earlier(earlier, sums, grads, live)


def _at(slots: Tensor, index: int) -> Tensor:
    """Return a copy of one slot. A view would keep all slots allocated as long as the state exists."""
    return slots[:, :, index].clone(memory_format=torch.contiguous_format)


def _whole(grads: tuple[Tensor | None, ...], sums: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the memory, the normaliser and the returned summaries, with zeros for missing ones."""
    like = (sums[2], sums[0], *sums, *sums)
    return [torch.zeros_like(x[:, :, 0]) if g is None else g for g, x in zip(grads, like, strict=False)]


def _of_earlier(earlier: list[Tensor], sums: list[Tensor], grads: list[Tensor], live: int) -> list[Tensor | None]:
    """Return the gradients of the summary of the first chunk's earlier tokens. ``a`` is their share of its weight."""
    if not earlier or live < 2:
        return [None] * len(earlier)
    weight, key_sum, value_sum = (x[:, :, 1] for x in sums)
    grad_weight, grad_keys, grad_values = (x[:, :, 1] for x in grads)
    a = (earlier[0] - weight).exp()
    inner = (grad_keys * (earlier[1] - key_sum)).sum(-1) + (grad_values * (earlier[2] - value_sum)).sum(-1)
    return [a * (grad_weight + inner), a.unsqueeze(-1) * grad_keys, a.unsqueeze(-1) * grad_values]
