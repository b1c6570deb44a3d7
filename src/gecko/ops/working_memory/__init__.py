"""Working memory: a matrix per head that stores the tokens that have left the attention window (paper Eq. 9–16).

With context parallelism, the maps of the chunks depend on the normaliser, so the ranks exchange twice: first the
weights of their chunks and the tokens of the last chunk, which the next rank summarises; then one affine map each, of
all chunks that enter. No rank waits for the chain of another: the maps of all earlier ranks give its initial memory.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.dispatch import CPU_KERNEL_WIDTH, choose_backend
from gecko.ops.common import (
    check_shape,
    compute_dtype,
    full_precision,
    layout_of_call,
    run_by_chunk_offset,
    run_by_length,
)
from gecko.ops.working_memory.chunked import Grid, enter_chunked, working_memory_by_chunk, working_memory_step
from gecko.ops.working_memory.rules import RULES, Adaptive, ChunkSummary, Entered, Orthogonal, Rule, WorkingMemoryState
from gecko.runtime.tensors import to_device
from gecko.segments import ContextExchange, Pending, Segments

__all__ = ["ChunkSummary", "WorkingMemoryState", "working_memory", "working_memory_reference"]

RuleName = Literal["adaptive", "linear", "orthogonal"]


def working_memory(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, *, rule: RuleName = "adaptive",
    state: WorkingMemoryState | None = None, segments: Segments | None = None,
) -> tuple[Tensor, WorkingMemoryState]:  # fmt: skip
    """Read the memory for each query, and write each chunk into the memory when it leaves the attention window.

    Adaptive rule (paper Eq. 16): w is the sum of exp(k) over a chunk, z the sum over the document so far, ρ = w / z,
    φ the softmax of k over the time steps of the chunk, and ψ the softmax over features:
        M ← (1 − ρ) ⊙ M + ρ ⊙ Σ_j φ_j (v_j − ψ(k_j) M)ᵀ,   read: ψ(q)ᵀ M.
    Orthogonal rule (the authors' Gekko): v_j − (v_j · p_j / V) p_j in place of v_j − ψ(k_j) M, with p_j = ψ(k_j) M
    divided by its root mean square, √(mean square + 10⁻⁶).
    Linear rule (Infini-attention, paper Eq. 9–11): ψ = elu + 1, and τ is the sum of ψ(k) over the document so far:
        M ← M + Σ_j ψ(k_j) (v_j − ψ(k_j) M / ψ(k_j) τ)ᵀ,   read: ψ(q)ᵀ M / ψ(q) τ.
    A query of chunk u reads the memory after chunk u − 2. It reads zero if chunk u − 2 ends in another document.
    If a chunk holds several documents, only the tokens of the last one enter.

    Args:
        q, k: (B, H, T, key_head_dim), without rotary embedding; v: (B, H, T, value_head_dim). Arithmetic is float32
            or wider.

    Returns:
        (B, H, T, value_head_dim) in the dtype of v, and the state after the last token.
    """
    batch, heads, length, key_dim = q.shape
    check_shape("k", k, (batch, heads, length, key_dim))
    check_shape("v", v, (batch, heads, length, v.shape[-1]))
    dtype = compute_dtype(q)
    segments = layout_of_call(segments, batch, length, q.device)
    if state is None:
        given = rule, batch, heads, key_dim, v.shape[-1], dtype, q.device
        state = segments.initial(("working memory", *given), lambda: WorkingMemoryState.empty(*given))
    _check_state(state, (batch, heads), key_dim, v.shape[-1])
    with full_precision(q):
        if segments.ends is not None and not (rule == "adaptive" and _cpu_kernel_takes((q, k, v), state)):
            form = partial(working_memory, chunk_size=chunk_size, rule=rule)
            return run_by_length(form, (q, k, v), state, segments)
        # The step's graph decides by the position whether the token ends a chunk; a first token needs no such graph.
        if length == 1 and not (segments.at_start and torch.compiler.is_exporting()):
            inputs = q.to(dtype), k.to(dtype), v.to(dtype)
            out, state = working_memory_step(RULES[rule], chunk_size, inputs, state, segments)
            return out.to(v.dtype), state

        def whole(
            inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
        ) -> tuple[Tensor, WorkingMemoryState]:
            update = RULES[rule]
            if isinstance(update, Orthogonal):
                wide = tuple(x.to(dtype) for x in inputs)
                return working_memory_by_chunk(update, chunk_size, wide, state, segments)
            return enter_memory(rule, chunk_size, inputs, state, segments).read(state.memory)

        out, state = run_by_chunk_offset(whole, (q, k, v), state, segments, chunk_size)
    return out.to(v.dtype), state


def enter_memory(
    rule: RuleName, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> Entered:
    """Summarise the chunks of a call of several tokens, for rows with the same chunk offset.

    Arguments are those of ``working_memory``, whose orthogonal rule has no such form. The memory of ``state`` is not
    used. Autocast must be disabled.
    """
    assert rule != "orthogonal", "the map of the chunks is not affine in the memory"
    if choose_backend(inputs[2], cpu=False) == "triton":
        from gecko.ops.working_memory.triton import enter_triton

        return enter_triton(RULES[rule], chunk_size, inputs, state, segments)
    wide = tuple(x.to(compute_dtype(inputs[0])) for x in inputs)
    if rule == "adaptive" and _cpu_kernel_takes(wide, state):
        from gecko.ops.working_memory.cpu import enter_cpu

        return enter_cpu(RULES[rule], chunk_size, wide, state, segments)
    return enter_chunked(RULES[rule], chunk_size, wide, state, segments)


def _check_state(state: WorkingMemoryState, lists: tuple[int, int], key_dim: int, value_dim: int) -> None:
    check_shape("state.memory", state.memory, (*lists, key_dim, value_dim))
    check_shape("state.normaliser", state.normaliser, (*lists, key_dim))
    check_shape("state.previous_resets", state.previous_resets, lists[:1])
    for name, part in (("previous", state.previous), ("current", state.current)):
        check_shape(f"state.{name}.weight", part.weight, (*lists, key_dim))
        check_shape(f"state.{name}.key_sum", part.key_sum, (*lists, key_dim, key_dim))
        check_shape(f"state.{name}.value_sum", part.value_sum, (*lists, key_dim, value_dim))


def _cpu_kernel_takes(inputs: tuple[Tensor, ...], state: WorkingMemoryState) -> bool:
    """Return whether the C kernels support these dtypes and sizes: features per head must fill whole registers."""
    floats = (x for x in state.tensors().values() if x.is_floating_point())
    fits = all(x.shape[-1] % CPU_KERNEL_WIDTH == 0 for x in inputs)
    return choose_backend(*inputs, *floats, triton=False, cpu=fits) == "cpu"


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


def working_memory_reference(
    inputs: tuple[Tensor, Tensor, Tensor], chunk_size: int, rule: RuleName, state: WorkingMemoryState,
    segments: Segments,
) -> tuple[Tensor, WorkingMemoryState]:  # fmt: skip
    """Compute ``working_memory`` token by token, directly from the equations, one row at a time."""
    outputs, states = [], []
    for row in range(segments.batch):
        one = state.map(operator.itemgetter(row))
        out, one = _read_row([x[row] for x in inputs], chunk_size, rule, one, segments.select([row]))
        outputs.append(out)
        states.append(one)
    parts = [iter(one.tensors().values()) for one in states]
    return torch.stack(outputs), state.map(lambda _: torch.stack([next(part) for part in parts]))


def _read_row(
    inputs: list[Tensor], c: int, rule: RuleName, state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    sums = (torch.zeros_like(x) for x in (state.current.key_sum, state.current.value_sum))
    empty = ChunkSummary(torch.full_like(state.normaliser, 0.0 if rule == "linear" else -1e30), *sums)
    outputs, begin = [], int(segments.clock.position)
    for t, (q, k, v) in enumerate(zip(*(x.unbind(1) for x in inputs), strict=True)):
        document_start, chunk_start = int(segments.document_starts[0, t]), (begin + t) // c * c
        in_chunk = document_start >= chunk_start
        if segments.starts is not None and segments.starts[0, t]:
            state = replace(state, current=empty)
        found = _found(rule, q, state)
        outputs.append(found if document_start < chunk_start - c else torch.zeros_like(found))
        if rule == "orthogonal":  # v without its part along the memory's answer
            memory = torch.zeros_like(state.memory) if in_chunk else _with_chunk(rule, state, empty).memory
            answer = torch.einsum("hz,hzv->hv", k.softmax(-1), memory)
            unit = answer / (answer.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            v = v - (v * unit).sum(-1, keepdim=True) / v.shape[-1] * unit
        state = replace(state, current=_with_token(rule, k, v, state, in_chunk))
        if (begin + t + 1) % c == 0:
            state = replace(_with_chunk(rule, state, empty), previous_resets=torch.tensor(in_chunk, device=q.device))
    return torch.stack(outputs, dim=1), state


def _found(rule: RuleName, q: Tensor, state: WorkingMemoryState) -> Tensor:
    """Return ψ(q)ᵀ M, for the linear rule divided by ψ(q) τ."""
    psi = F.elu(q) + 1 if rule == "linear" else q.softmax(-1)
    found = torch.einsum("hz,hzv->hv", psi, state.memory)
    return found / (psi * state.normaliser).sum(-1, keepdim=True) if rule == "linear" else found


def _with_token(rule: RuleName, k: Tensor, v: Tensor, state: WorkingMemoryState, in_chunk: bool) -> ChunkSummary:
    """Return the summary of the current chunk with one more token. ``in_chunk``: its document started in this chunk."""
    current = state.current
    if rule == "linear":
        old, new = torch.ones_like(k), F.elu(k) + 1
        # ψ(k) / (ψ(k) τ), where τ sums over the document before this chunk; zero if it has no tokens there.
        before = state.previous.weight + (0 if state.previous_resets else state.normaliser)
        total = (new * (torch.zeros_like(before) if in_chunk else before)).sum(-1, keepdim=True)
        psi = new / total if bool((total > 0).all()) else torch.zeros_like(new)
        weight = current.weight + new
    else:
        psi, weight = k.softmax(-1) * (rule == "adaptive"), torch.logaddexp(current.weight, k)
        old, new = (current.weight - weight).exp(), (k - weight).exp()
    old, new = old[..., None], new[..., None]
    keys, values = old * current.key_sum + new * psi[:, None], old * current.value_sum + new * v[:, None]
    return ChunkSummary(weight, keys, values)


def _with_chunk(rule: RuleName, state: WorkingMemoryState, empty: ChunkSummary) -> WorkingMemoryState:
    """Return the state after a complete chunk: the previous chunk enters the memory, the current one replaces it."""
    memory, norm, previous = state.memory, state.normaliser, state.previous
    if state.previous_resets:
        memory, norm = torch.zeros_like(memory), empty.weight
    written = previous.value_sum - previous.key_sum @ memory
    if rule == "linear":
        norm, memory = norm + previous.weight, memory + written
    else:
        norm = torch.logaddexp(norm, previous.weight)
        rho = (previous.weight - norm).exp()[..., None]
        memory = (1 - rho) * memory + rho * written
    return replace(state, memory=memory, normaliser=norm, previous=state.current, current=empty)
