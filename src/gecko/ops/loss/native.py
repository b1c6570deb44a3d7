"""Cross-entropy and its gradient by the C kernel: the gradient takes the place of the logits."""

from __future__ import annotations

from torch import Tensor

from gecko.ops.native import call


def losses_and_gradient_native(logits: Tensor, targets: Tensor, count: float, ignored: int) -> tuple[Tensor, Tensor]:
    """−log softmax(logits)[target] of every row (N,), and the gradient of their sum over ``count``, which overwrites
    ``logits`` (N, V), float32; both zero where the target is ``ignored``.

    Raises:
        IndexError: a target is neither ``ignored`` nor in 0..V − 1.
    """
    wrong = ((targets < 0) | (targets >= logits.shape[1])) & (targets != ignored)
    if bool(wrong.any()):
        raise IndexError(
            f"targets must be ids in 0..{logits.shape[1] - 1}, or {ignored}; got {int(targets[wrong][0])}."
        )
    losses = logits.new_empty(len(logits))
    call("loss_and_gradient", logits, targets.contiguous(), losses, count, ignored, *logits.shape)
    return losses, logits
