"""Cross-entropy and its gradient by C kernels, which overwrite the logits with their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import call, refuse_second_derivatives, save, saved
from gecko.ops.backends.dispatch import products_are_rounded


def losses_and_gradient_cpu(logits: Tensor, targets: Tensor, count: float, ignored: int) -> tuple[Tensor, Tensor]:
    """Return −log softmax(logits)[target] per row, (N,), and the gradient of their sum divided by ``count``.

    The gradient overwrites ``logits`` (N, V), float32. Both are zero in rows whose target is ``ignored``.

    Raises:
        IndexError: a target is neither ``ignored`` nor in 0..V − 1.
    """
    _check_ids(targets, logits.shape[1], ignored)
    losses = logits.new_empty(len(logits))
    call("loss_and_gradient", logits, targets.contiguous(), losses, count, ignored, *logits.shape)
    return losses, logits


def mean_cross_entropy_cpu(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Compute ``linear_cross_entropy`` in float32 for few weights. The logits stay in a core's cache.

    Raises:
        IndexError: a target is neither ``ignored`` nor in 0..V − 1.
    """
    _check_ids(targets, len(weight), ignored)
    given = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    loss: Tensor = MeanCrossEntropyCPU.apply(products_are_rounded(), *given, ignored)
    return loss


def _check_ids(targets: Tensor, vocabulary: int, ignored: int) -> None:
    wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != ignored)
    if bool(wrong.any()):
        raise IndexError(f"targets must be ids in 0..{vocabulary - 1}, or {ignored}; got {int(targets[wrong][0])}.")


class MeanCrossEntropyCPU(torch.autograd.Function):
    """Mean loss. The forward pass computes the gradients from the logits of each block; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, rounded: bool, hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
        count = (targets != ignored).sum().clamp(min=1)
        losses = hidden.new_empty(len(hidden))
        grads = [torch.empty_like(x) if ctx.needs_input_grad[1 + i] else None for i, x in enumerate((hidden, weight))]
        sizes = *hidden.shape, len(weight)
        call("loss_of_head", hidden, weight, targets, losses, *grads, float(count), ignored, int(rounded), *sizes)
        save(ctx, *grads)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        of_hidden, of_weight = (None if of is None else of * grad for of in saved(ctx))
        return None, of_hidden, of_weight, None, None
