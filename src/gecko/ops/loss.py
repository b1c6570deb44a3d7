"""Projection and cross-entropy in blocks of tokens, so that the logits of a long text never exist at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target of a token that is not trained on."""

BLOCK_ELEMENTS = 2**22
"""Logits held at a time."""


class _MeanCrossEntropy(torch.autograd.Function):
    """Gradients are formed with the logits at hand and only scaled in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        count = (targets != IGNORED).sum().clamp(min=1)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        projection = weight.to(hidden.dtype)
        for block in _blocks(hidden.shape[0], weight.shape[0]):
            logits = (hidden[block] @ projection.t()).to(wide)
            log_probabilities = logits.log_softmax(-1)
            total += F.nll_loss(log_probabilities, targets[block], reduction="sum", ignore_index=IGNORED)
            if grad_hidden is None and grad_weight is None:
                continue
            grad = _logit_gradient(log_probabilities, targets[block], count).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, projection, out=grad_hidden[block])
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[block]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad).to(ctx.weight_dtype),
            None,
        )


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of −log softmax(hidden weightᵀ)[target] over targets other than ``IGNORED``; 0 if there are none.

    Args:
        hidden: (N, D); weight: (V, D); targets: (N,) int64.

    Returns:
        A scalar, float32 or wider.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return _MeanCrossEntropy.apply(hidden, weight, targets)


def token_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(hidden weightᵀ)[target] of every token, 0 where ``IGNORED``; same arguments, no gradient.

    Returns:
        (N,), float32 or wider.
    """
    losses = []
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for block in _blocks(hidden.shape[0], weight.shape[0]):
            logits = hidden[block] @ weight.to(hidden.dtype).t()
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(F.cross_entropy(logits, targets[block], reduction="none", ignore_index=IGNORED))
    return torch.cat(losses)


def _blocks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // vocabulary)
    for begin in range(0, tokens, size):
        yield slice(begin, begin + size)


def _logit_gradient(log_probabilities: Tensor, targets: Tensor, count: Tensor) -> Tensor:
    """(softmax − one-hot) / count, zero for ignored targets; overwrites its input."""
    grad = log_probabilities.exp_()
    trained = targets != IGNORED
    grad.scatter_add_(1, targets.clamp(min=0).unsqueeze(1), -torch.ones_like(grad[:, :1]))
    return grad.mul_((trained.to(grad.dtype) / count).unsqueeze(1))
