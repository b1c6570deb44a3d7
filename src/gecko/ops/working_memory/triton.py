"""Working memory on a GPU: Triton kernels for features, factors and the chain of updates, cuBLAS for the products.

The products φᵀψ, φᵀv and ψ(q) M are large, dense and batched (256 × 2,048 × 2,048 each for gecko-7b), so cuBLAS
computes them. Triton kernels compute their operands in the dtype of v. The operands are not kept for the backward pass,
which computes them again.

One layer of gecko-7b at T = 32 K, one row, bf16 moves 1.1 GiB of inputs and outputs and 0.8 GiB of features, sums and
memories, and takes 310 GFLOP forward, of which 17 are the chain: 0.42 ms at 4.8 TB/s and 0.37 ms at 790 TFLOP/s. It
saves 224 MiB besides inputs and output: sums of values and keys, A and memories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import custom_op
from gecko.ops.common import float32_product
from gecko.ops.working_memory.chunked import Grid, normalisers_of
from gecko.ops.working_memory.rules import (
    Adaptive,
    ChunkSummary,
    Rule,
    WorkingMemoryState,
    empty_summary,
    with_identity,
)
from gecko.ops.working_memory.triton_chain import chain, chain_backward_forms, chain_forward, factors
from gecko.ops.working_memory.triton_features import features, features_backward, weigh_backward, weigh_forward
from gecko.segments import Segments

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


_Entering = tuple[ChunkSummary, Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class EnteredTriton:
    """Form of ``EnteredMemory`` for the kernels. The steps of the chain are the chunks that enter the memory."""

    rule: Rule
    grid: Grid
    q: Tensor
    dtype: torch.dtype
    """That of v."""
    resets: Tensor
    state: WorkingMemoryState
    keeps_state: bool
    chunks: ChunkSummary
    a: Tensor
    rho: Tensor
    normaliser: Tensor
    """(B, H, key), after the last chunk that enters."""
    divisor: Tensor | None
    """(B, H, n, key): τ of the linear rule, by which the reads of each chunk are normalised. None: adaptive rule."""

    @classmethod
    def enter(
        cls, rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
    ) -> EnteredTriton:
        """Summarise the chunks of rows with the same chunk offset."""
        grid = Grid.of(segments, chunk_size)
        q, k, v = (grid.lay(x).contiguous() for x in inputs)
        resets = torch.cat([state.previous_resets.unsqueeze(1), grid.resets], dim=1)
        form = _enter_adaptive if isinstance(rule, Adaptive) else _enter_linear
        entering = form(rule, grid, k, v, state, resets, _end(grid))
        return cls(rule, grid, q, v.dtype, resets, state, segments.keeps_state, *entering)

    def affine_map(self) -> Tensor:
        terms = torch.cat([self.state.previous.value_sum.unsqueeze(2), self.chunks.value_sum], dim=2)
        terms, identity = with_identity(terms, self.state.memory)
        return chain(*self._inputs(terms[:, :, 0], terms[:, :, 1:], identity), self.dtype)[1].view(identity.shape)

    def read(self, memory: Tensor) -> tuple[Tensor, WorkingMemoryState]:
        rule, grid, state, chunks = self.rule, self.grid, self.state, self.chunks
        inputs = self._inputs(state.previous.value_sum, chunks.value_sum, memory)
        out, last, _ = read_memories(self.q, grid.allowed, self.divisor, *inputs, self.dtype)
        if not self.keeps_state:
            return grid.unlay(out), state
        end = _end(grid)
        entered = state.previous if end == 0 else _at(chunks, end - 1)
        going_on = _at(chunks, end) if end < grid.chunks else empty_summary(rule, state.memory)
        after = type(state)(last.view_as(memory), self.normaliser, entered, going_on, self.resets[:, end])
        return grid.unlay(out), after

    def _inputs(self, first: Tensor, terms: Tensor, memory: Tensor) -> Iterator[Tensor]:
        """Yield the inputs of ``chain``."""
        return (x.flatten(0, 1).contiguous() for x in (self.a, first, terms, self.rho, memory))


def _end(grid: Grid) -> int:
    """Return the number of chunks that the call completes. As many enter the memory."""
    return grid.chunks - (grid.empty > 0)


def _at(chunks: ChunkSummary, index: int) -> ChunkSummary:
    """Return a copy of one summary. A view would keep all of them allocated as long as the state exists."""
    return chunks.map(lambda x: x[:, :, index].clone())


def _with_earlier(rule: Rule, grid: Grid, state: WorkingMemoryState, chunks: ChunkSummary) -> ChunkSummary:
    """Add the tokens of earlier calls to the first chunk. There are none if the call starts at a chunk boundary."""
    if not grid.phase:
        return chunks
    first = rule.merge(state.current.where(grid.continues, empty_summary(rule, state.memory)), _at(chunks, 0))
    return ChunkSummary(*(
        torch.cat([f.unsqueeze(2), x[:, :, 1:]], dim=2)
        for f, x in zip(first.tensors().values(), chunks.tensors().values(), strict=True)
    ))  # fmt: skip


def _enter_adaptive(
    rule: Rule, grid: Grid, k: Tensor, v: Tensor, state: WorkingMemoryState, resets: Tensor, end: int
) -> _Entering:
    summaries = ChunkSummary(*summarise(k, v, grid.counted, None))
    chunks, previous = _with_earlier(rule, grid, state, summaries), state.previous
    given = state.normaliser, previous.weight, previous.key_sum, chunks.weight, chunks.key_sum
    a, rho, last, _ = factors(*(x.flatten(0, 1).contiguous() for x in given), resets, end)
    a, rho, last = (x.unflatten(0, k.shape[:2]) for x in (a, rho, last))
    return chunks, a, rho, last, None


def _enter_linear(
    rule: Rule, grid: Grid, k: Tensor, v: Tensor, state: WorkingMemoryState, resets: Tensor, end: int
) -> _Entering:
    weights = weigh(k, grid.counted, False)
    current = state.current.where(grid.continues, empty_summary(rule, state.memory))
    whole = torch.cat([rule.accumulate(current.weight, weights[:, :, 0]).unsqueeze(2), weights[:, :, 1:]], dim=2)
    normalisers = normalisers_of(rule, state, whole, resets)
    before = torch.where(grid.resets[:, None, :, None], rule.empty_weight, normalisers[:, :, 1:-1])
    summaries = ChunkSummary(weights, *summarise(k, v, grid.counted, before)[1:])
    chunks = _with_earlier(rule, grid, state, summaries)

    sums = torch.cat([state.previous.key_sum.unsqueeze(2), chunks.key_sum[:, :, : max(end - 1, 0)]], dim=2)[:, :, :end]
    a = torch.eye(k.shape[-1], dtype=torch.float32, device=k.device) - sums
    rho = torch.ones_like(normalisers[:, :, :end])
    a = a.masked_fill(resets[:, None, :end, None, None], 0)
    return chunks, a, rho, normalisers[:, :, end].clone(), normalisers[:, :, :-2].contiguous()


def _keep_weigh(ctx, inputs, output):
    k, counted, ctx.adaptive = inputs
    ctx.save_for_backward(k, counted, output)


def _pass_back_weigh(ctx, grad):
    return weigh_gradient(grad, *ctx.saved_tensors, ctx.adaptive), None, None


weigh_gradient = custom_op("memory_weigh_backward")(weigh_backward)
weigh = custom_op("memory_weigh", _pass_back_weigh, _keep_weigh)(weigh_forward)


@custom_op("memory_summarise_backward")
def summarise_gradient(
    grad_weight: Tensor, grad_keys: Tensor, grad_values: Tensor, k: Tensor, v: Tensor, counted: Tensor,
    before: Tensor | None, weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``summarise`` for k, v and ``before`` (empty for the adaptive rule)."""
    adaptive = before is None
    phi, psi = features(k, counted, weight, before, adaptive, v.dtype)
    assert phi is not None
    grad_keys, grad_values = (x.flatten(0, 2).to(v.dtype) for x in (grad_keys, grad_values))
    grad_v = torch.bmm(phi, grad_values).view_as(v)
    # The large part of a gradient is float32: the sum of its parts is rounded, not each of them.
    grad_phi = float32_product(v.flatten(0, 2), grad_values.mT), torch.bmm(psi, grad_keys.mT)
    given = k, counted, weight, before, grad_phi, torch.bmm(phi, grad_keys), adaptive
    if not adaptive:
        grad_k, by_before = features_backward(*given, k.dtype)
        return grad_k, grad_v, by_before
    grad_k, by_weight = features_backward(*given, torch.float32)
    return weigh_backward(grad_weight + by_weight, k, counted, weight, True, onto=grad_k), grad_v, weight.new_empty(0)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[0])


def _pass_back_summarise(ctx, *grads):
    saved = ctx.saved_tensors
    grad_k, grad_v, by_before = summarise_gradient(*grads, *saved)
    return grad_k, grad_v, None, None if saved[3] is None else by_before


@custom_op("memory_summarise", _pass_back_summarise, _keep)
def summarise(k: Tensor, v: Tensor, counted: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight of each chunk, which normalises φ of the adaptive rule (empty for the linear one), Σ φ ψᵀ and
    Σ φ vᵀ: (B, H, n, key), (B, H, n, key, key) and (B, H, n, key, value) float32.

    Args:
        k: (B, H, n, c, key); v: (B, H, n, c, value); counted: (B, 1, n, c, 1) bool.
        before: (B, H, n, key) float32, τ before each chunk, which normalises ψ of the linear rule; None: adaptive rule.
    """
    weight = weigh_forward(k, counted, True) if before is None else before.new_empty(0)
    phi, psi = features(k, counted, weight, before, before is None, v.dtype)
    assert phi is not None
    shape = (*k.shape[:3], k.shape[4], -1)
    return weight, float32_product(phi.mT, psi).view(shape), float32_product(phi.mT, v.flatten(0, 2)).view(shape)


@custom_op("memory_read_backward")
def read_gradient(
    grad: Tensor | None, grad_last: Tensor | None, q: Tensor, allowed: Tensor, normaliser: Tensor | None, a: Tensor,
    first: Tensor, b: Tensor, rho: Tensor, memories: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``read_memories`` for q, the normaliser (empty if it is None), and the chain's inputs."""
    adaptive = normaliser is None
    grad = memories.new_zeros(*q.shape[:4], memories.shape[3]) if grad is None else grad
    grad = grad.flatten(0, 2)
    _, psi = features(q, allowed, None, normaliser, adaptive, memories.dtype)
    grad_psi = float32_product(grad, memories.flatten(0, 1).mT)
    grad_q, grad_normaliser = features_backward(q, allowed, None, normaliser, (None, None), grad_psi, adaptive, q.dtype)
    grad_memories = float32_product(psi.mT, grad).view_as(memories)
    del psi, grad_psi  # the chain needs much memory
    of_chain = chain_backward_forms(grad_memories, grad_last, a, first, b, rho, memories)
    return grad_q, grad_normaliser, *of_chain


def _keep_read(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7], output[2])
    ctx.set_materialize_grads(False)


def _pass_back_read(ctx, grad, grad_last, _):
    saved = ctx.saved_tensors
    grad_q, by_normaliser, *of_chain = read_gradient(grad, grad_last, *saved)
    return grad_q, None, None if saved[2] is None else by_normaliser, *of_chain, None


@custom_op("memory_read", _pass_back_read, _keep_read)
def read_memories(
    q: Tensor, allowed: Tensor, normaliser: Tensor | None, a: Tensor, first: Tensor, b: Tensor, rho: Tensor,
    initial: Tensor, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return ψ(q) M_s, zero where not allowed, (B, H, n, c, value) of ``dtype``, and what ``chain`` returns: M_n and,
    only for the backward pass, M_0 … M_{n − 1}. It is one operator because the gradients of these are float32.

    Args:
        q: (B, H, n, c, key); allowed: (B, 1, n, c, 1) bool; a, first, b, rho, initial: those of ``chain``.
        normaliser: (B, H, n, key) float32, τ of the linear rule; None for the adaptive rule.
    """
    memories, last = chain_forward(a, first, b, rho, initial, dtype)
    _, psi = features(q, allowed, None, normaliser, normaliser is None, dtype)
    return torch.bmm(psi, memories.flatten(0, 1)).view(*q.shape[:4], -1), last, memories
