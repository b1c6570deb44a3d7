"""Working memory for one token, each row at its own place in its own chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gecko.ops.working_memory.rules import Rule, empty_summary
from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.working_memory import WorkingMemoryState


def remember_token(
    rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    """Read, add the token to its chunk's summary, and let rows that complete a chunk enter the previous one."""
    q, k, v = inputs
    position, start = segments.clock.position, segments.document_starts[:, 0]
    chunk_start = position - position % chunk_size
    began_here = (start >= chunk_start).to(q.device)
    allowed = (start < chunk_start - chunk_size).to(q.device).view(-1, 1, 1, 1)
    out = rule.read(q, allowed, state.memory, state.normaliser)

    nothing = empty_summary(rule, q.shape[:2], q.shape[-1], v.shape[-1], q.dtype, q.device)
    current = state.current if segments.starts is None else state.current.where(segments.continues[:, 0], nothing)
    everyone = torch.ones_like(allowed)
    normaliser = _with_previous(rule, state)
    before = torch.where(began_here.view(-1, 1, 1), rule.empty_weight, normaliser)
    token = rule.summarise(k, v, everyone, rule.weigh(k, everyone), before)
    current = rule.merge(current, token)

    completes = (position + 1) % chunk_size == 0
    if not completes.any():
        return out, type(state)(state.memory, state.normaliser, state.previous, current, state.previous_resets)
    done = completes.to(q.device)
    memory = _enter_previous(rule, state, normaliser)
    return out, type(state)(
        torch.where(done.view(-1, 1, 1, 1), memory, state.memory),
        torch.where(done.view(-1, 1, 1), normaliser, state.normaliser),
        current.where(done, state.previous),
        nothing.where(done, current),
        torch.where(done, began_here, state.previous_resets),
    )


def _with_previous(rule: Rule, state: WorkingMemoryState) -> Tensor:
    both = rule.accumulate(state.normaliser, state.previous.weight)
    return torch.where(state.previous_resets.view(-1, 1, 1), state.previous.weight, both)


def _enter_previous(rule: Rule, state: WorkingMemoryState, after: Tensor) -> Tensor:
    a, b = rule.affine(state.previous, after)
    return a.masked_fill(state.previous_resets.view(-1, 1, 1, 1), 0) @ state.memory + b
