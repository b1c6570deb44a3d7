"""Triton backend of cross-entropy: softmax, loss and the gradient of the logits in one kernel.

A program processes one token. It reads the logits for the maximum and the sum, and again for the gradient. With a large
vocabulary it fills a multiprocessor, so that the logits of all running programs stay in the cache until then. It moves
10 bytes per logit, against 38 with separate operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, custom_op, tile

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@custom_op("cross_entropy")
def losses_and_gradient(
    logits: Tensor, targets: Tensor, count: Tensor, ignored: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return −log softmax(logits)[target] per token, (N,), and the gradient of their sum divided by ``count``, (N, V)
    as ``dtype``. ``count`` is a scalar tensor. Both results are zero for ``ignored`` targets."""
    tokens, vocabulary = logits.shape
    losses, grad = logits.new_empty(tokens), torch.empty_like(logits, dtype=dtype)
    block = min(8192, tile(vocabulary, 1))
    Launch(_token, (tokens,), {
        "p_logits": logits.contiguous(), "p_targets": targets.contiguous(), "p_count": count, "p_losses": losses,
        "p_grad": grad, "ignored": ignored, "vocabulary": vocabulary, "block": block,
    }, max(4, block // 256), registers=64).run()  # fmt: skip
    return losses, grad


@triton.jit
def _token(p_logits, p_targets, p_count, p_losses, p_grad, ignored, vocabulary: tl.constexpr, block: tl.constexpr):
    i_token = tl.program_id(0).to(tl.int64)
    p_logits += i_token * vocabulary
    p_grad += i_token * vocabulary
    i = tl.arange(0, block)
    b_largest = tl.full([block], float("-inf"), tl.float32)
    b_sum = tl.zeros([block], tl.float32)
    for first in range(0, vocabulary, block):
        b_logits = tl.load(p_logits + first + i, mask=first + i < vocabulary, other=-1e30).to(tl.float32)
        b_new = tl.maximum(b_largest, b_logits)
        b_sum = b_sum * tl.exp(b_largest - b_new) + tl.exp(b_logits - b_new)
        b_largest = b_new
    largest = tl.max(b_largest, 0)
    log_sum = largest + tl.log(tl.sum(b_sum * tl.exp(b_largest - largest), 0))

    target = tl.load(p_targets + i_token)
    trained = target != ignored
    scale = tl.where(trained, 1.0, 0.0) / tl.load(p_count).to(tl.float32)
    for first in range(0, vocabulary, block):
        held = first + i < vocabulary
        b_logits = tl.load(p_logits + first + i, mask=held, other=-1e30).to(tl.float32)
        b_grad = (tl.exp(b_logits - log_sum) - tl.where(first + i == target, 1.0, 0.0)) * scale
        tl.store(p_grad + first + i, b_grad.to(p_grad.dtype.element_ty), mask=held)
    at_target = tl.load(p_logits + tl.where(trained, target, 0)).to(tl.float32)
    tl.store(p_losses + i_token, tl.where(trained, log_sum - at_target, 0.0))
