"""Kernels that compute the features of keys and queries (chunk weights, φ and ψ) and their gradients.

Inputs are on the grid of chunks: x (B, H, n, c, d), mask (B, 1, n, c, 1) bool. Features and gradients of masked tokens
are zero. Adaptive: weight = log Σ exp(x) over the time steps of a chunk, φ = exp(x − weight), ψ = softmax of x over
features. Linear: φ = e = elu(x) + 1, weight = Σ e, ψ = e / (e · before).

Each kernel reads x once and writes each feature once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, tile
from gecko.ops.working_memory.rules import EMPTY_LOG

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


def weigh_forward(x: Tensor, mask: Tensor, adaptive: bool) -> Tensor:
    """Return the weights (B, H, n, d), float32, of the chunks of keys x (B, H, n, c, d)."""
    _, heads, chunks, chunk, width = x.shape
    out = x.new_empty(*x.shape[:3], width, dtype=torch.float32)
    block_d = min(tile(width), 64)
    arguments = dict(
        p_x=x, p_mask=mask, p_out=out, chunks=chunks, heads=heads, chunk_size=chunk, width=width, adaptive=adaptive,
        block_t=64, block_d=block_d,
    )  # fmt: skip
    Launch(_weigh_kernel, (out.shape[:3].numel(), blocks(width, block_d)), arguments, warps=4).run()
    return out


def weigh_backward(
    grad: Tensor, x: Tensor, mask: Tensor, weight: Tensor, adaptive: bool, onto: Tensor | None = None
) -> Tensor:
    """Return the gradient of ``weigh_forward`` with respect to x, plus ``onto``, float32."""
    out = torch.empty_like(x)
    grid, common = _common(x, mask, adaptive)
    more = dict(p_weight=weight, p_grad_weight=grad.contiguous(), p_onto=onto, p_grad=out)
    Launch(_weigh_backward_kernel, grid, common | more, warps=4).run()
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
