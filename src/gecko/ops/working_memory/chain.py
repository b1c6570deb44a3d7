"""The sequential part of the memory: a chain of small affine maps, and running normalisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _AffineChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
        batch, heads, count = a.shape[:3]
        factors, terms = (x.permute(2, 0, 1, 3, 4).flatten(1, 2) for x in (a, b))
        memories = b.new_empty(count + 1, batch * heads, *b.shape[3:])
        memories[0] = initial.flatten(0, 1)
        for i in range(count):
            torch.baddbmm(terms[i], factors[i], memories[i], out=memories[i + 1])
        ctx.save_for_backward(factors, memories)
        return memories.unflatten(1, (batch, heads)).permute(1, 2, 0, 3, 4)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factors, memories = ctx.saved_tensors
        batch, heads = grad.shape[:2]
        total = grad.permute(2, 0, 1, 3, 4).flatten(1, 2).clone(memory_format=torch.contiguous_format)
        for i in range(len(factors) - 1, -1, -1):
            total[i].baddbmm_(factors[i].mT, total[i + 1])
        grad_factors = total[1:] @ memories[:-1].mT
        grads = (x.unflatten(1, (batch, heads)) for x in (grad_factors, total))
        grad_a, grad_b = (x.permute(1, 2, 0, 3, 4) for x in grads)
        return grad_a, grad_b[:, :, 1:], grad_b[:, :, 0]


def affine_chain(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """M_{i+1} = A_i M_i + B_i.

    Args:
        a: (B, H, n, key, key); b: (B, H, n, key, value); initial: (B, H, key, value).

    Returns:
        M_0 … M_n, (B, H, n + 1, key, value).
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
