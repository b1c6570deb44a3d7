"""Output projection and cross-entropy in blocks of tokens, so that the logits of all tokens never exist at once.

Softmax, loss and sums of gradients are float32. On a GPU, products have the dtype of autocast and return float32
logits; the C kernels, for heads with few weights, do the same. Other products on a CPU would round the logits, which
are therefore computed in the dtype of the hidden states; only products for gradients use the dtype of autocast.

``F.linear_cross_entropy`` rounds the loss to 16 bits, returns NaN if all targets are ignored, supports neither a second
backward pass nor ``torch.compile``, and took 2 to 4 times as long on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, linear, packed_weights_run_on, save, saved
from gecko.ops.backends.dispatch import choose_backend, on_gpu, products_are_rounded
from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import check_shape, compute_dtype, linear_dtype

IGNORED = -100
"""Target of a token that is not trained on."""

BLOCK_ELEMENTS = 2**22
"""Logits per block on a CPU: they fit in its caches."""

FEWEST_TOKENS = 512
"""Minimum tokens per block on a CPU. With fewer, adding up the weight gradient takes longer than the products."""

GPU_BLOCK_ELEMENTS = 2**27
"""Logits per block on a GPU: 768 MB with their 16-bit gradient. Blocks are large enough for compute-bound products, and
for the pass that adds up the weight gradient after each block to be negligible."""


class _MeanCrossEntropy(FirstOrder):
    """Mean loss. The forward pass computes the gradients from the logits of each block; backward only scales them.

    With count = share · 2ⁿ, the forward pass divides by ``share`` in [½, 1): float16 has no gradients of 1 / count.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, z_loss: float) -> Tensor:
        count = (targets != IGNORED).sum().clamp(min=1)
        total = torch.zeros((), dtype=compute_dtype(hidden), device=hidden.device)
        share = torch.frexp(count.to(total.dtype)).mantissa
        ctx.dtypes = hidden.dtype, weight.dtype
        given = dtype if on_gpu(hidden) else hidden.dtype
        read, projection = hidden.to(dtype), weight.to(dtype)
        hidden, weight = hidden.to(given), weight.to(given)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=total.dtype) if ctx.needs_input_grad[1] else None
        for block in _blocks(hidden, weight.shape[0]):
            logits = _product(hidden[block], weight)
            if z_loss:
                losses, grad = _with_z_loss(logits, targets[block], share, dtype, z_loss)
            else:
                losses, grad = _losses_and_gradient(logits, targets[block], share, dtype)
            total += losses
            if grad_hidden is not None:
                grad_hidden[block] = linear(grad, projection.t())
            if grad_weight is not None:
                _product(grad.t(), read[block].t(), onto=grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight, share / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_weight, factor = ctx.saved_tensors
        grad = grad * factor
        by_hidden = None if grad_hidden is None else (grad_hidden * grad.to(grad_hidden.dtype)).to(ctx.dtypes[0])
        by_weight = None if grad_weight is None else (grad_weight * grad).to(ctx.dtypes[1])
        return by_hidden, by_weight, None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Tensor:
    """Return the mean of −log softmax(hidden weightᵀ)[target] over targets other than ``IGNORED``; 0 if there are none.

    Args:
        hidden: (N, D); weight: (V, D); targets: (N,) int64.
        z_loss: coefficient of the squared logarithm of the softmax's denominator, whose mean is added to the loss.

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError, TypeError: weight or targets have a wrong shape or dtype.
        IndexError: on a CPU, a target is neither in 0..V − 1 nor ``IGNORED``.
    """
    _check(hidden, weight, targets)
    dtype = _product_dtype(hidden)
    differentiated = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if differentiated and not z_loss and packed_weights_run_on(hidden, (weight,), fills_outputs=True):
        _check_ids(targets, len(weight))
        given = hidden.contiguous(), weight.contiguous(), targets.contiguous()
        return MeanCrossEntropyCPU.apply(products_are_rounded(), *given)
    with torch.autocast(hidden.device.type, enabled=False):
        if differentiated or z_loss:
            return _MeanCrossEntropy.apply(hidden, weight, targets, dtype, z_loss)
        return _token_losses(hidden, weight, targets, dtype).sum() / (targets != IGNORED).sum().clamp(min=1)


def token_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return −log softmax(hidden weightᵀ)[target] per token, (N,), float32 or wider; 0 for ``IGNORED`` targets.

    Arguments and errors are those of ``linear_cross_entropy``. There is no gradient.
    """
    _check(hidden, weight, targets)
    dtype = _product_dtype(hidden)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return _token_losses(hidden, weight, targets, dtype)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    check_shape("weight", weight, (len(weight), hidden.shape[-1]))
    check_shape("targets", targets, tuple(hidden.shape[:1]))
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64; got {targets.dtype}. Use targets.long().")


def _token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    dtype = dtype if on_gpu(hidden) else hidden.dtype
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    return torch.cat([
        F.cross_entropy(_product(hidden[block], weight), targets[block], reduction="none", ignore_index=IGNORED)
        for block in _blocks(hidden, weight.shape[0])
    ])  # fmt: skip


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of products: that of autocast if the device supports such products, else that of ``hidden``."""
    if on_gpu(hidden):
        return linear_dtype(hidden)
    return torch.bfloat16 if products_are_rounded() and hidden.dtype == torch.float32 else hidden.dtype


def _product(a: Tensor, b: Tensor, onto: Tensor | None = None) -> Tensor:
    """Return a bᵀ in float32 or wider, added to ``onto`` in its memory if it is given.

    On a GPU, sums of 16-bit products are not rounded to 16 bits.
    """
    if on_gpu(a) and a.dtype in (torch.bfloat16, torch.float16):
        if onto is not None:
            return torch.addmm(onto, a, b.t(), out_dtype=torch.float32, out=onto)
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    found = linear(a, b).to(compute_dtype(a))
    return found if onto is None else onto.add_(found)


def _blocks(hidden: Tensor, vocabulary: int) -> Iterator[slice]:
    size = _block_size(hidden, vocabulary)
    return (slice(begin, begin + size) for begin in range(0, hidden.shape[0], size))


def _block_size(hidden: Tensor, vocabulary: int) -> int:
    if on_gpu(hidden):  # whole tiles of products
        return max(128, GPU_BLOCK_ELEMENTS // vocabulary // 128 * 128)
    return max(FEWEST_TOKENS, BLOCK_ELEMENTS // vocabulary)


def _losses_and_gradient(logits: Tensor, targets: Tensor, count: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum of −log softmax(logits)[target], and its gradient divided by ``count``, as ``dtype``."""
    match choose_backend(logits):
        case "triton":
            from gecko.ops.loss.triton import losses_and_gradient

            losses, grad = losses_and_gradient(logits, targets, count, IGNORED, dtype)
            return losses.sum(), grad
        case "cpu":
            losses, grad = losses_and_gradient_cpu(logits, targets, float(count))
            return losses.sum(), grad.to(dtype)
    log_probabilities = logits.log_softmax(-1)
    total = F.nll_loss(log_probabilities, targets, reduction="sum", ignore_index=IGNORED)
    grad = log_probabilities.exp_()  # softmax, then less the one-hot target
    grad.scatter_add_(1, targets.clamp(min=0).unsqueeze(1), -torch.ones_like(grad[:, :1]))
    return total, grad.mul_(((targets != IGNORED).to(grad.dtype) / count).unsqueeze(1)).to(dtype)


def losses_and_gradient_cpu(logits: Tensor, targets: Tensor, count: float) -> tuple[Tensor, Tensor]:
    """Return −log softmax(logits)[target] per row, (N,), and the gradient of their sum divided by ``count``.

    The gradient overwrites ``logits`` (N, V), float32. Both are zero in rows whose target is ``IGNORED``.
    """
    _check_ids(targets, logits.shape[1])
    losses = logits.new_empty(len(logits))
    call("loss_and_gradient", logits, targets.contiguous(), losses, count, IGNORED, *logits.shape)
    return losses, logits


def _check_ids(targets: Tensor, vocabulary: int) -> None:
    wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != IGNORED)
    if bool(wrong.any()):
        raise IndexError(f"targets must be ids in 0..{vocabulary - 1}, or {IGNORED}; got {int(targets[wrong][0])}.")


class MeanCrossEntropyCPU(CFunction):
    """``_MeanCrossEntropy`` in float32 for few weights. The logits stay in a core's cache."""

    @staticmethod
    def forward(ctx: Any, rounded: bool, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        count = (targets != IGNORED).sum().clamp(min=1)
        losses = hidden.new_empty(len(hidden))
        grads = [torch.empty_like(x) if ctx.needs_input_grad[1 + i] else None for i, x in enumerate((hidden, weight))]
        sizes = *hidden.shape, len(weight)
        call("loss_of_head", hidden, weight, targets, losses, *grads, float(count), IGNORED, int(rounded), *sizes)
        save(ctx, *grads)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = (None if of is None else of * grad for of in saved(ctx))
        return None, of_hidden, of_weight, None


def _with_z_loss(
    logits: Tensor, targets: Tensor, count: Tensor, dtype: torch.dtype, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return what ``_losses_and_gradient`` returns for −log softmax(logits)[target] + z_loss · log_sum².

    The second term's gradient is 2 z_loss · log_sum · softmax, and softmax is the first term's plus the one-hot target.
    """
    trained = targets != IGNORED
    # Before the gradient, which may overwrite the logits.
    log_sums = logits.logsumexp(-1).masked_fill(~trained, 0.0)
    # Not rounded: the second term is smaller than the rounding of the first to 16 bits.
    losses, grad = _losses_and_gradient(logits, targets, count, logits.dtype)
    slope = (2 * z_loss * log_sums).unsqueeze(1)
    grad.mul_(1 + slope).scatter_add_(1, targets.clamp(min=0).unsqueeze(1), slope / count)
    return losses + z_loss * log_sums.square().sum(), grad.to(dtype)
