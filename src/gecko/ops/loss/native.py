"""Cross-entropy and its gradient by the C kernel: the gradient takes the place of the logits."""

from __future__ import annotations

from torch import Tensor

from gecko.ops.native import call


def losses_and_gradient_native(logits: Tensor, targets: Tensor, count: float, ignored: int) -> tuple[Tensor, Tensor]:
    """−log softmax(logits)[target] of every row (N,), and the gradient of their sum over ``count``, which overwrites
    ``logits`` (N, V), float32; both zero where the target is ``ignored``."""
    losses = logits.new_empty(len(logits))
    call("loss_and_gradient", logits, targets.contiguous(), losses, count, ignored, *logits.shape)
    return losses, logits
