"""Linear recurrences over the levels of a scan plan: what one chunk hands to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.scan_plan import ScanPlan


class _ChunkStates(torch.autograd.Function):
    """h at the start of every chunk, from h_{j+1} = decay · h_j + update_j."""

    @staticmethod
    def forward(ctx: Any, updates: Tensor, decay: Tensor, initial: Tensor, plan: ScanPlan) -> Tensor:
        states = torch.empty_like(updates)
        levels, sources, factor = plan.levels(states), plan.levels(updates), decay.unsqueeze(1)
        levels[0].copy_(initial)
        for j in range(len(levels) - 1):
            size = levels[j + 1].shape[1]
            torch.addcmul(sources[j][:, :size], factor, levels[j][:, :size], out=levels[j + 1])
        ctx.plan = plan
        ctx.save_for_backward(states, decay)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        states, decay = ctx.saved_tensors
        total = grad.clone(memory_format=torch.contiguous_format)
        grad_updates = torch.zeros_like(states)
        totals, sinks = ctx.plan.levels(total), ctx.plan.levels(grad_updates)
        factor = decay.conj().resolve_conj().unsqueeze(1)
        for j in range(len(totals) - 2, -1, -1):
            size = totals[j + 1].shape[1]
            sinks[j][:, :size].copy_(totals[j + 1])
            totals[j][:, :size].addcmul_(factor, totals[j + 1])
        grad_decay = (grad_updates * states.conj()).sum(1)
        return grad_updates, grad_decay, totals[0].clone(), None


def chunk_states(updates: Tensor, decay: Tensor, initial: Tensor, plan: ScanPlan) -> Tensor:
    """The state at the start of every scan chunk, h_{j+1} = decay · h_j + update_j along a document.

    Args:
        updates: (features, chunks, modes), real or complex: what each chunk adds.
        decay: (features, modes): factor over one whole chunk.
        initial: (features, runs, modes): state before each document's first chunk.

    Returns:
        (features, chunks, modes).
    """
    return _ChunkStates.apply(updates, decay, initial, plan)


def decayed_sum(x: Tensor, decay: Tensor, initial: Tensor, plan: ScanPlan) -> Tensor:
    """s_t = decay · s_{t-1} + x_t per feature, from ``initial`` or from zero where a document starts.

    Args:
        x: (batch, length, features); decay: (features,) in [0, 1], float64; initial: (batch, features).

    Returns:
        (batch, length, features), every s_t.
    """
    steps = torch.arange(plan.chunk, device=x.device)
    powers = (decay[:, None] ** torch.arange(plan.chunk + 1, device=x.device)).to(x.dtype)
    kernel = torch.where(steps >= steps[:, None], powers[:, (steps - steps[:, None]).clamp(min=0)], 0)
    folded = plan.fold(x)
    within = torch.bmm(folded, kernel)
    start = plan.initial(initial).t().unsqueeze(-1)
    carried = chunk_states(within[:, :, -1:], powers[:, -1:], start, plan)
    return plan.unfold(torch.baddbmm(within, carried, powers[:, None, 1:]))
