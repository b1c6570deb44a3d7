"""Working memory of a context rank: what later ranks need, and the state before the rank's first token.

The maps of the chunks depend on the normaliser, so the ranks exchange twice: first the weights of their chunks and the
tokens of the last chunk, which the next rank summarises; then one affine map each, of all chunks that enter. No rank
waits for the chain of another: the maps of all earlier ranks together give its initial memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import choose_backend
from gecko.ops.common import compute_dtype, full_precision
from gecko.ops.working_memory import Rule as RuleName
from gecko.ops.working_memory import WorkingMemoryState, enter_memory, working_memory
from gecko.ops.working_memory.chunked import Grid
from gecko.ops.working_memory.rules import RULES, Adaptive, ChunkSummary, Rule
from gecko.runtime.tensors import to_device
from gecko.segments import ContextExchange, Pending, Segments


def start_working_memory(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, rule: RuleName, state: WorkingMemoryState | None,
    segments: Segments,
) -> Pending[tuple[Tensor, WorkingMemoryState]]:  # fmt: skip
    """Return what ``working_memory`` returns. A rank sends the map of its chunks, and waits for those of earlier ranks.

    ``chunk_size`` divides the position of every row on a rank, where ``state`` comes from ``memory_state_before``.
    """
    exchange = segments.exchange
    if exchange is None:
        found = working_memory(q, k, v, chunk_size, rule=rule, state=state, segments=segments)
        return lambda: found
    assert state is not None, "a rank has the state before its first token"
    with full_precision(q):
        entered = enter_memory(rule, chunk_size, (q, k, v), state, segments)
        factor, term = entered.affine_map().split([k.shape[-1], v.shape[-1]], dim=-1)

    # The term, most of the bytes, travels in the dtype of v. On a GPU memories are rounded to it when read.
    arriving = exchange.send((), [factor, term.to(v.dtype)])

    def receive() -> tuple[Tensor, WorkingMemoryState]:
        factors, terms = arriving()
        with full_precision(factors):
            memory = torch.zeros_like(state.memory)
            for factor, term in zip(factors.flip(0), terms.flip(0).to(memory.dtype), strict=True):
                memory = factor @ memory + term
            out, after = entered.read(state.memory + memory)
        return out.to(v.dtype), after

    return receive


def chunk_weights(rule: RuleName, chunk_size: int, k: Tensor, state: WorkingMemoryState, segments: Segments) -> Tensor:
    """Return what later ranks need of the keys k (B, H, T, key): the weight (B, H, 2, key) of the chunks before the
    last one, since the last document start among them, and that of the last one."""
    grid = Grid.of(segments, chunk_size)
    with full_precision(k):
        weights = _weigh(RULES[rule], grid.lay(k), grid.counted)
        sets = [state.normaliser.unsqueeze(2), state.previous.weight.unsqueeze(2), weights[:, :, :-1]]
        resets = torch.cat([state.previous_resets.unsqueeze(1), grid.resets[:, :-1]], dim=1)
        index = torch.arange(grid.chunks + 1, device=resets.device)
        begin = torch.where(resets, index[1:], 0).amax(1, keepdim=True)
        counted = (index >= begin)[:, None, :, None]
        return torch.stack([RULES[rule].total(torch.cat(sets, dim=2), counted), weights[:, :, -1]], dim=2)


def memory_state_before(
    rule_name: RuleName, chunk_size: int, state: WorkingMemoryState, weights: Tensor, keys: Tensor, values: Tensor,
    segments: Segments, exchange: ContextExchange,
) -> WorkingMemoryState:  # fmt: skip
    """Return the state before this rank's first token, up to its memory.

    Args:
        state: that before the call on rank 0; on the other ranks it is empty.
        weights: (R − 1, B, H, 2, key), the ``chunk_weights`` of earlier ranks, the nearest first.
        keys, values: (B, H, c, d), the last chunk of the previous rank.
    """
    rule, first = RULES[rule_name], exchange.first
    reach = exchange.chunks_reach[:, :, None, :, None]
    before, last = torch.where(reach, weights, rule.empty_weight).unbind(3)
    clock, device = segments.clock, keys.device
    with full_precision(keys):
        normaliser = rule.total(torch.cat([state.normaliser[None], before, last[1:]]).movedim(0, 2), None)
        place = clock.position.unsqueeze(1) + torch.arange(-chunk_size, 0, device="cpu")
        counted = (place >= clock.document_start.unsqueeze(1)) | first
        resets = to_device(clock.document_start >= clock.position - chunk_size, device)
        in_document = torch.where(resets.view(-1, 1, 1), rule.empty_weight, normaliser)
        summary = _summarise(rule, keys, values, to_device(counted[:, None, None, :, None], device), in_document)
    received = torch.full_like(resets, not first)
    return replace(
        state, normaliser=normaliser, previous=summary.where(received, state.previous),
        previous_resets=torch.where(received, resets, state.previous_resets),
    )  # fmt: skip


def _weigh(rule: Rule, k: Tensor, counted: Tensor) -> Tensor:
    """Return the weights (B, H, n, key) of chunks of keys k (B, H, n, c, key)."""
    if choose_backend(k, cpu=False) == "triton":
        from gecko.ops.working_memory.triton import weigh

        return weigh(k.contiguous(), counted, isinstance(rule, Adaptive))
    return rule.weigh(k.to(compute_dtype(k)), counted)


def _summarise(rule: Rule, keys: Tensor, values: Tensor, counted: Tensor, before: Tensor) -> ChunkSummary:
    """Summarise one chunk of keys and values (B, H, c, d), given the normaliser ``before`` it."""
    k, v, adaptive = keys.unsqueeze(2), values.unsqueeze(2), isinstance(rule, Adaptive)
    if choose_backend(v, cpu=False) == "triton":
        from gecko.ops.working_memory.triton import summarise

        given = None if adaptive else before.unsqueeze(2).contiguous()
        weight, *sums = summarise(k.contiguous(), v.contiguous(), counted, given)
        summary = ChunkSummary(weight if adaptive else _weigh(rule, k, counted), *sums)
    else:
        weight = _weigh(rule, k, counted)
        summary = rule.summarise(k.to(weight.dtype), v.to(weight.dtype), counted, weight, before.unsqueeze(2))
    return summary.map(lambda x: x.squeeze(2))
