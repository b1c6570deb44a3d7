"""Reference implementation of the working memory: token by token, directly from the equations."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.working_memory import WorkingMemoryState
    from gecko.ops.working_memory.rules import ChunkSummary

Rule = Literal["adaptive", "linear"]


def working_memory_reference(
    inputs: tuple[Tensor, Tensor, Tensor],
    chunk_size: int,
    rule: Rule,
    state: WorkingMemoryState,
    segments: Segments,
) -> tuple[Tensor, WorkingMemoryState]:
    """Compute ``working_memory`` one row at a time."""
    outputs, states = [], []
    for row in range(segments.batch):
        one = state.map(operator.itemgetter(row))
        out, one = _read_row([x[row] for x in inputs], chunk_size, rule, one, segments.select([row]))
        outputs.append(out)
        states.append(one)
    parts = [iter(one.tensors().values()) for one in states]
    return torch.stack(outputs), state.map(lambda _: torch.stack([next(part) for part in parts]))


def _read_row(
    inputs: list[Tensor], c: int, rule: Rule, state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    sums = (torch.zeros_like(x) for x in (state.current.key_sum, state.current.value_sum))
    empty = type(state.current)(torch.full_like(state.normaliser, -1e30 if rule == "adaptive" else 0.0), *sums)
    outputs, begin = [], int(segments.clock.position)
    for t, (q, k, v) in enumerate(zip(*(x.unbind(1) for x in inputs), strict=True)):
        document_start, chunk_start = int(segments.document_starts[0, t]), (begin + t) // c * c
        in_chunk = document_start >= chunk_start
        if segments.starts is not None and segments.starts[0, t]:
            state = replace(state, current=empty)
        found = _found(rule, q, state)
        outputs.append(found if document_start < chunk_start - c else torch.zeros_like(found))
        state = replace(state, current=_with_token(rule, k, v, state, in_chunk))
        if (begin + t + 1) % c == 0:
            state = replace(_with_chunk(rule, state, empty), previous_resets=torch.tensor(in_chunk, device=q.device))
    return torch.stack(outputs, dim=1), state


def _found(rule: Rule, q: Tensor, state: WorkingMemoryState) -> Tensor:
    """Return ψ(q)ᵀ M, for the linear rule divided by ψ(q) τ."""
    psi = q.softmax(-1) if rule == "adaptive" else F.elu(q) + 1
    found = torch.einsum("hz,hzv->hv", psi, state.memory)
    return found if rule == "adaptive" else found / (psi * state.normaliser).sum(-1, keepdim=True)


def _with_token(rule: Rule, k: Tensor, v: Tensor, state: WorkingMemoryState, in_chunk: bool) -> ChunkSummary:
    """Return the summary of the current chunk with one more token. ``in_chunk``: its document started in this chunk."""
    current = state.current
    if rule == "adaptive":
        psi, weight = k.softmax(-1), torch.logaddexp(current.weight, k)
        old, new = (current.weight - weight).exp(), (k - weight).exp()
    else:
        old, new = torch.ones_like(k), F.elu(k) + 1
        psi, weight = _over_total(new, state, in_chunk), current.weight + new
    return type(current)(
        weight,
        old[..., None] * current.key_sum + new[..., None] * psi[:, None],
        old[..., None] * current.value_sum + new[..., None] * v[:, None],
    )


def _over_total(psi: Tensor, state: WorkingMemoryState, in_chunk: bool) -> Tensor:
    """Return ψ(k) / (ψ(k) τ), where τ sums over the document before this chunk; zero if it has no tokens there."""
    before = state.previous.weight + (0 if state.previous_resets else state.normaliser)
    total = (psi * (torch.zeros_like(before) if in_chunk else before)).sum(-1, keepdim=True)
    return psi / total if bool((total > 0).all()) else torch.zeros_like(psi)


def _with_chunk(rule: Rule, state: WorkingMemoryState, empty: ChunkSummary) -> WorkingMemoryState:
    """Return the state after a complete chunk: the previous chunk enters the memory, the current one replaces it."""
    memory, norm, previous = state.memory, state.normaliser, state.previous
    if state.previous_resets:
        memory, norm = torch.zeros_like(memory), empty.weight
    written = previous.value_sum - previous.key_sum @ memory
    if rule == "adaptive":
        norm = torch.logaddexp(norm, previous.weight)
        rho = (previous.weight - norm).exp()[..., None]
        memory = (1 - rho) * memory + rho * written
    else:
        norm, memory = norm + previous.weight, memory + written
    return replace(state, memory=memory, normaliser=norm, previous=state.current, current=empty)
