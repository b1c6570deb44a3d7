"""Working memory on a GPU: Triton kernels for features, factors and the chain of updates, cuBLAS for the products.

The products φᵀψ, φᵀv and ψ(q) M are large, dense and batched (256 × 2,048 × 2,048 each for gecko-7b). Triton kernels
compute their operands in the dtype of v, which are not kept: the backward pass computes them again. One layer of
gecko-7b saves 224 MiB at T = 32 K besides inputs and output: sums of values and keys, A and memories.

Inputs of the kernels are on the grid of chunks: x (B, H, n, c, d), mask (B, 1, n, c, 1) bool. Features and gradients of
masked tokens are zero. Adaptive: weight = log Σ exp(x) over the time steps of a chunk, φ = exp(x − weight), ψ = softmax
of x over features. Linear: φ = e = elu(x) + 1, weight = Σ e, ψ = e / (e · before). Each kernel reads x once and writes
each feature once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile
from gecko.ops.common import float32_product
from gecko.ops.working_memory.chunked import Grid, normalisers_of
from gecko.ops.working_memory.rules import (
    EMPTY_LOG,
    Adaptive,
    ChunkSummary,
    Entered,
    Rule,
    WorkingMemoryState,
    empty_summary,
    with_identity,
)
from gecko.ops.working_memory.triton_chain import chain, chain_backward, factors
from gecko.segments import Segments

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


_TILE = 2048
"""Elements of x per program, 16 per thread."""

_EMPTY_LOG = tl.constexpr(EMPTY_LOG)


@triton.jit
def _elu1(b_x):
    return tl.where(b_x > 0, b_x + 1, tl.exp(tl.minimum(b_x, 0.0)))


@triton.jit(do_not_specialize=["chunks", "heads"])
def _weigh_kernel(
    p_x, p_mask, p_out, chunks, heads, chunk_size: tl.constexpr, width: tl.constexpr, adaptive: tl.constexpr,
    block_t: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Store the weight of a chunk: log Σ exp(x) (adaptive) or Σ e (linear)."""
    i_chunk = tl.program_id(0).to(tl.int64)
    i_mask = i_chunk // (heads * chunks) * chunks + i_chunk % chunks
    i_d = tl.program_id(1) * block_d + tl.arange(0, block_d)
    b_top = tl.full((block_d,), _EMPTY_LOG, tl.float32)
    b_sum = tl.zeros((block_d,), tl.float32)
    for begin in range(0, chunk_size, block_t):
        i_t = begin + tl.arange(0, block_t)
        counted = tl.load(p_mask + i_mask * chunk_size + i_t, mask=i_t < chunk_size, other=0) != 0
        m_x = counted[:, None] & (i_d < width)[None, :]
        b_x = tl.load(p_x + (i_chunk * chunk_size + i_t)[:, None] * width + i_d[None, :], mask=m_x, other=0.0)
        b_x = b_x.to(tl.float32)
        if adaptive:
            b_new = tl.maximum(b_top, tl.max(tl.where(m_x, b_x, _EMPTY_LOG), 0))
            b_e = tl.exp(tl.where(m_x, b_x - b_new[None, :], float("-inf")))
            b_sum = b_sum * tl.exp(b_top - b_new) + tl.sum(b_e, 0)
            b_top = b_new
        else:
            b_sum += tl.sum(tl.where(m_x, _elu1(b_x), 0.0), 0)
    if adaptive:
        b_sum = tl.where(b_sum > 0, b_top + tl.log(tl.where(b_sum > 0, b_sum, 1.0)), _EMPTY_LOG)
    tl.store(p_out + i_chunk * width + i_d, b_sum, mask=i_d < width)


@triton.jit
def _tile_of(p_x, p_mask, chunks, heads, chunk_size: tl.constexpr, width: tl.constexpr, block_t: tl.constexpr,
             block_d: tl.constexpr):  # fmt: skip
    """Load a tile of tokens of one chunk. Return the chunk, the features, the offsets, the mask of places that exist,
    the mask of tokens that are not masked, and x."""
    of_chunk: tl.constexpr = (chunk_size + block_t - 1) // block_t
    i_chunk = (tl.program_id(0) // of_chunk).to(tl.int64)
    i_t = tl.program_id(0) % of_chunk * block_t + tl.arange(0, block_t)
    i_d = tl.arange(0, block_d)
    i_mask = i_chunk // (heads * chunks) * chunks + i_chunk % chunks
    shown = tl.load(p_mask + i_mask * chunk_size + i_t, mask=i_t < chunk_size, other=0) != 0
    m_d = (i_d < width)[None, :]
    m_all, m_x = (i_t < chunk_size)[:, None] & m_d, shown[:, None] & m_d
    i_x = (i_chunk * chunk_size + i_t)[:, None] * width + i_d[None, :]
    b_x = tl.load(p_x + i_x, mask=m_x, other=0.0).to(tl.float32)
    return i_chunk, i_d, i_x, m_all, m_x, b_x


@triton.jit
def _phi(b_x, p_weight, i_chunk, i_d, m_x, width: tl.constexpr, adaptive: tl.constexpr):
    if adaptive:
        b_weight = tl.load(p_weight + i_chunk * width + i_d, mask=i_d < width, other=0.0)
        b_phi = tl.exp(tl.where(m_x, b_x - b_weight[None, :], float("-inf")))
    else:
        b_phi = tl.where(m_x, _elu1(b_x), 0.0)
    return b_phi


@triton.jit
def _psi(b_x, p_before, i_chunk, i_d, m_x, width: tl.constexpr, adaptive: tl.constexpr):
    """Return ψ and its divisor: Σ e (adaptive) or e · before (linear). If the divisor is zero, return ψ = 0 and 1."""
    if adaptive:
        b_top = tl.max(tl.where(m_x, b_x, -1e30), 1)
        b_e = tl.where(m_x, tl.exp(tl.minimum(b_x - b_top[:, None], 0.0)), 0.0)
        b_total = tl.sum(b_e, 1)
    else:
        b_before = tl.load(p_before + i_chunk * width + i_d, mask=i_d < width, other=0.0)
        b_e = tl.where(m_x, _elu1(b_x), 0.0)
        b_total = tl.sum(b_e * b_before[None, :], 1)
    none = b_total == 0
    b_total = tl.where(none, 1.0, b_total)
    return tl.where(none[:, None], 0.0, b_e / b_total[:, None]), b_total


@triton.jit(do_not_specialize=["chunks", "heads"])
def _features_kernel(
    p_x, p_mask, p_weight, p_before, p_phi, p_psi, chunks, heads, chunk_size: tl.constexpr, width: tl.constexpr,
    adaptive: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    i_chunk, i_d, i_x, m_all, m_x, b_x = _tile_of(p_x, p_mask, chunks, heads, chunk_size, width, block_t, block_d)
    if p_phi is not None:
        b_phi = _phi(b_x, p_weight, i_chunk, i_d, m_x, width, adaptive)
        tl.store(p_phi + i_x, b_phi.to(p_phi.dtype.element_ty), mask=m_all)
    b_psi, _ = _psi(b_x, p_before, i_chunk, i_d, m_x, width, adaptive)
    tl.store(p_psi + i_x, b_psi.to(p_psi.dtype.element_ty), mask=m_all)


@triton.jit(do_not_specialize=["chunks", "heads"])
def _features_backward_kernel(
    p_x, p_mask, p_weight, p_before, p_grad_phi, p_more_phi, p_grad_psi, p_grad, p_part, chunks, heads,
    chunk_size: tl.constexpr, width: tl.constexpr, adaptive: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x, and this tile's part of the gradient of the weight (adaptive) or ``before`` (linear)."""
    i_chunk, i_d, i_x, m_all, m_x, b_x = _tile_of(p_x, p_mask, chunks, heads, chunk_size, width, block_t, block_d)
    b_psi, b_total = _psi(b_x, p_before, i_chunk, i_d, m_x, width, adaptive)
    b_dpsi = tl.load(p_grad_psi + i_x, mask=m_x, other=0.0).to(tl.float32)
    b_dot = tl.sum(b_psi * b_dpsi, 1)[:, None]
    b_part = tl.zeros((block_d,), tl.float32)
    if adaptive:
        b_dx = b_psi * (b_dpsi - b_dot)
    else:
        b_before = tl.load(p_before + i_chunk * width + i_d, mask=i_d < width, other=0.0)
        some = tl.sum(b_psi, 1)[:, None] > 0
        b_dx = tl.where(some, (b_dpsi - b_dot * b_before[None, :]) / b_total[:, None], 0.0)
        b_part = -tl.sum(b_psi * b_dot, 0)
    if p_grad_phi is not None:
        b_dphi = tl.load(p_grad_phi + i_x, mask=m_x, other=0.0)
        b_dphi += tl.load(p_more_phi + i_x, mask=m_x, other=0.0).to(tl.float32)
        if adaptive:
            b_dphi *= _phi(b_x, p_weight, i_chunk, i_d, m_x, width, adaptive)
            b_part = -tl.sum(b_dphi, 0)
        b_dx += b_dphi
    if not adaptive:
        b_dx *= tl.where(b_x > 0, 1.0, tl.exp(tl.minimum(b_x, 0.0)))
    tl.store(p_grad + i_x, b_dx.to(p_grad.dtype.element_ty), mask=m_all)
    if p_part is not None:
        tl.store(p_part + tl.program_id(0).to(tl.int64) * width + i_d, b_part, mask=i_d < width)


@triton.jit(do_not_specialize=["chunks", "heads"])
def _weigh_backward_kernel(
    p_x, p_mask, p_weight, p_grad_weight, p_onto, p_grad, chunks, heads, chunk_size: tl.constexpr, width: tl.constexpr,
    adaptive: tl.constexpr, block_t: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    i_chunk, i_d, i_x, m_all, m_x, b_x = _tile_of(p_x, p_mask, chunks, heads, chunk_size, width, block_t, block_d)
    b_dw = tl.load(p_grad_weight + i_chunk * width + i_d, mask=i_d < width, other=0.0)
    if adaptive:
        b_dx = _phi(b_x, p_weight, i_chunk, i_d, m_x, width, adaptive) * b_dw[None, :]
    else:
        b_dx = tl.where(m_x, tl.where(b_x > 0, 1.0, tl.exp(tl.minimum(b_x, 0.0))) * b_dw[None, :], 0.0)
    if p_onto is not None:
        b_dx += tl.load(p_onto + i_x, mask=m_all, other=0.0)
    tl.store(p_grad + i_x, b_dx.to(p_grad.dtype.element_ty), mask=m_all)


def _common(x: Tensor, mask: Tensor, adaptive: bool) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid and the arguments of a kernel over tiles of whole tokens."""
    _, heads, chunks, chunk, width = x.shape
    block_d = tile(width)
    block_t = max(4, _TILE // block_d)
    arguments = dict(
        p_x=x, p_mask=mask, chunks=chunks, heads=heads, chunk_size=chunk, width=width, adaptive=adaptive,
        block_t=block_t, block_d=block_d,
    )  # fmt: skip
    return (x.shape[:3].numel() * blocks(chunk, block_t),), arguments


@custom_op("memory_weigh_backward")
def weigh_backward(
    grad: Tensor, x: Tensor, mask: Tensor, weight: Tensor, adaptive: bool, onto: Tensor | None = None
) -> Tensor:
    """Return the gradient of ``weigh`` with respect to x, plus ``onto``, float32."""
    out = torch.empty_like(x)
    grid, common = _common(x, mask, adaptive)
    more = dict(p_weight=weight, p_grad_weight=grad.contiguous(), p_onto=onto, p_grad=out)
    Launch(_weigh_backward_kernel, grid, common | more, warps=4).run()
    return out


@custom_op("memory_weigh", weigh_backward, of=[0], saves=lambda inputs, output: (*inputs[:2], output, inputs[2]))
def weigh(x: Tensor, mask: Tensor, adaptive: bool) -> Tensor:
    """Return the weights (B, H, n, d), float32, of the chunks of keys x (B, H, n, c, d)."""
    out, block_d = x.new_empty(*x.shape[:3], x.shape[4], dtype=torch.float32), min(tile(x.shape[4]), 64)
    arguments = _common(x, mask, adaptive)[1] | dict(p_out=out, block_t=64, block_d=block_d)
    Launch(_weigh_kernel, (out.shape[:3].numel(), blocks(x.shape[4], block_d)), arguments, warps=4).run()
    return out


def features(
    x: Tensor, mask: Tensor, weight: Tensor | None, before: Tensor | None, adaptive: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return φ and ψ as batches of matrices (B · H · n, c, d) of ``dtype``. φ is None if ``weight`` is None.

    ``weight`` and ``before`` are (B, H, n, d); the linear rule normalises ψ by ``before``.
    """
    psi = torch.empty(x.shape, dtype=dtype, device=x.device)
    phi = None if weight is None else torch.empty_like(psi)
    grid, common = _common(x, mask, adaptive)
    more = dict(p_weight=weight, p_before=before, p_phi=phi, p_psi=psi)
    Launch(_features_kernel, grid, common | more, warps=4).run()
    return None if phi is None else phi.flatten(0, 2), psi.flatten(0, 2)


def features_backward(
    x: Tensor, mask: Tensor, weight: Tensor | None, before: Tensor | None,
    grad_phi: tuple[Tensor, Tensor] | tuple[None, None], grad_psi: Tensor, adaptive: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, as ``dtype``, and of the weight (adaptive, with φ; else empty) or ``before`` (linear),
    (B, H, n, d) float32. ``grad_phi`` has two parts, the first one in float32."""
    out = torch.empty_like(x, dtype=dtype)
    grid, common = _common(x, mask, adaptive)
    part = None
    if weight is not None or not adaptive:
        part = x.new_empty(*x.shape[:3], grid[0] // x.shape[:3].numel(), x.shape[4], dtype=torch.float32)
    more = dict(
        p_weight=weight, p_before=before, p_grad_phi=grad_phi[0], p_more_phi=grad_phi[1], p_grad_psi=grad_psi,
        p_grad=out, p_part=part,
    )  # fmt: skip
    Launch(_features_backward_kernel, grid, common | more, warps=4).run()
    return out, x.new_empty(0, dtype=torch.float32) if part is None else part.sum(3)


def enter_triton(
    rule: Rule, chunk_size: int, inputs: tuple[Tensor, ...], state: WorkingMemoryState, segments: Segments
) -> Entered:
    """Summarise the chunks of rows with the same chunk offset. The steps of the chain are the chunks that enter."""
    grid, dtype, keeps_state = Grid.of(segments, chunk_size), inputs[2].dtype, segments.keeps_state
    previous = state.previous
    q, k, v = (grid.lay(x).contiguous() for x in inputs)
    resets = torch.cat([state.previous_resets.unsqueeze(1), grid.resets], dim=1)
    end = grid.chunks - (grid.empty > 0)  # chunks that the call completes; as many enter the memory
    form = _factors_adaptive if isinstance(rule, Adaptive) else _factors_linear
    chunks, a, rho, normaliser, divisor = form(rule, grid, k, v, state, resets, end)

    def at(index: int) -> ChunkSummary:
        """Return a copy of one summary. A view would keep all of them allocated as long as the state exists."""
        return chunks.map(lambda x: x[:, :, index].clone())

    def affine_map() -> Tensor:
        terms = torch.cat([previous.value_sum.unsqueeze(2), chunks.value_sum], dim=2)
        terms, identity = with_identity(terms, state.memory)
        given = a, terms[:, :, 0], terms[:, :, 1:], rho, identity
        return chain(*(x.flatten(0, 1).contiguous() for x in given), dtype)[1].view(identity.shape)

    def read(memory: Tensor) -> tuple[Tensor, WorkingMemoryState]:
        given = (x.flatten(0, 1).contiguous() for x in (a, previous.value_sum, chunks.value_sum, rho, memory))
        out, last, _ = read_memories(q, grid.allowed, divisor, *given, dtype)
        if not keeps_state:
            return grid.unlay(out), state
        entered = previous if end == 0 else at(end - 1)
        going_on = at(end) if end < grid.chunks else empty_summary(rule, state.memory)
        after = type(state)(last.view_as(memory), normaliser, entered, going_on, resets[:, end])
        return grid.unlay(out), after

    return Entered(affine_map, read)


_Factors = tuple[ChunkSummary, Tensor, Tensor, Tensor, Tensor | None]
"""Summaries of the chunks; A and ρ of those that enter; the normaliser after the last of them, (B, H, key); and τ of
the linear rule, (B, H, n, key), by which the reads of each chunk are divided."""


def _with_earlier(rule: Rule, grid: Grid, state: WorkingMemoryState, chunks: ChunkSummary) -> ChunkSummary:
    """Add the tokens of earlier calls to the first chunk. There are none if the call starts at a chunk boundary."""
    if not grid.phase:
        return chunks
    earlier = state.current.where(grid.continues, empty_summary(rule, state.memory))
    first = rule.merge(earlier, chunks.map(lambda x: x[:, :, 0].clone()))
    return ChunkSummary(*(
        torch.cat([f.unsqueeze(2), x[:, :, 1:]], dim=2)
        for f, x in zip(first.tensors().values(), chunks.tensors().values(), strict=True)
    ))  # fmt: skip


def _factors_adaptive(
    rule: Rule, grid: Grid, k: Tensor, v: Tensor, state: WorkingMemoryState, resets: Tensor, end: int
) -> _Factors:
    chunks = _with_earlier(rule, grid, state, ChunkSummary(*summarise(k, v, grid.counted, None)))
    given = state.normaliser, state.previous.weight, state.previous.key_sum, chunks.weight, chunks.key_sum
    a, rho, last, _ = factors(*(x.flatten(0, 1).contiguous() for x in given), resets, end)
    a, rho, last = (x.unflatten(0, k.shape[:2]) for x in (a, rho, last))
    return chunks, a, rho, last, None


def _factors_linear(
    rule: Rule, grid: Grid, k: Tensor, v: Tensor, state: WorkingMemoryState, resets: Tensor, end: int
) -> _Factors:
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


@custom_op("memory_summarise_backward")
def _summarise_backward(
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
    return weigh_backward(grad_weight + by_weight, k, counted, weight, True, grad_k), grad_v, weight.new_empty(0)


@custom_op("memory_summarise", _summarise_backward, of=[0, 1, 3], saves=lambda inputs, output: (*inputs, output[0]))
def summarise(k: Tensor, v: Tensor, counted: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight of each chunk, which normalises φ of the adaptive rule (empty for the linear one), Σ φ ψᵀ and
    Σ φ vᵀ: (B, H, n, key), (B, H, n, key, key) and (B, H, n, key, value) float32.

    Args:
        k: (B, H, n, c, key); v: (B, H, n, c, value); counted: (B, 1, n, c, 1) bool.
        before: (B, H, n, key) float32, τ before each chunk, which normalises ψ of the linear rule; None: adaptive rule.
    """
    weight = weigh(k, counted, True) if before is None else before.new_empty(0)
    phi, psi = features(k, counted, weight, before, before is None, v.dtype)
    assert phi is not None
    shape = (*k.shape[:3], k.shape[4], -1)
    return weight, float32_product(phi.mT, psi).view(shape), float32_product(phi.mT, v.flatten(0, 2)).view(shape)


@custom_op("memory_read_backward")
def _read_backward(
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
    return grad_q, grad_normaliser, *chain_backward(grad_memories, grad_last, a, first, b, rho, memories)


def _saved(inputs, output):
    return *inputs[:7], output[2]


@custom_op("memory_read", _read_backward, of=[0, *range(2, 8)], saves=_saved, results=2, zeros=False)
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
    memories, last = chain(a, first, b, rho, initial, dtype)
    _, psi = features(q, allowed, None, normaliser, normaliser is None, dtype)
    return torch.bmm(psi, memories.flatten(0, 1)).view(*q.shape[:4], -1), last, memories
