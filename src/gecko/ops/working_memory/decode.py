"""Working memory for one token, each row at its own place in its own chunk."""

from __future__ import annotations

from dataclasses import dataclass
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
    """What the token's place in the stream comes to, for each row; the same in all layers."""

    began_here: Tensor
    """(B,) bool: its document began in its chunk."""
    allowed: Tensor
    """(B, 1, 1, 1) bool: its document began before the previous chunk, so that it may read."""
    completes: Tensor | None
    """Rows whose chunk it completes; None where there is none."""

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
    """For the rows whose chunk is complete: the previous one enters the memory, and a chunk without tokens begins."""
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
