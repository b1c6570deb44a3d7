"""The sequential part of the memory: a chain of small affine maps, and running normalisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _AffineChain(torch.autograd.Function):
    """One map at a time, in scratch that stays in cache: where matrices of a batch lie apart, products do not write."""

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
    """M_{i+1} = A_i M_i + B_i from M_0 = ``initial``.

    Args:
        a: (B, H, n, key, key); b: (B, H, n, key, value); initial: (B, H, key, value).

    Returns:
        M_0 … M_{n−1}, (B, H, n, key, value), and M_n, (B, H, key, value).
    """
    return _AffineChain.apply(a, b, initial)


def segmented_scan(combine: Callable[[Tensor, Tensor], Tensor], x: Tensor, first: Tensor) -> Tensor:
    """x_i combined with all before it down to x_{first_i}, in log₂ n steps.

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
