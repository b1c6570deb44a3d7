"""Losses of a language model's head, an ``nn.Linear`` or what replaces it, without all logits at once where it has a
weight alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gecko.layers import is_bare, project
from gecko.ops.common import compute_dtype
from gecko.ops.loss import IGNORED, linear_cross_entropy, token_cross_entropy


def head_loss(head: nn.Linear, rows: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of hidden states (N, D) and targets (N,) in nats, with ``z_loss``, a scalar. It
    counts biases, adapters and hooks of the head."""
    if is_bare(head, bias=False):
        return linear_cross_entropy(rows, head.weight, targets, z_loss=z_loss)
    return _called_losses(head, rows, targets, z_loss).sum() / (targets != IGNORED).sum().clamp(min=1)


@torch.no_grad()
def head_token_losses(head: nn.Linear, rows: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of hidden states (N, D) in nats, (N,), 0 for ignored targets, as ``head_loss`` does."""
    if is_bare(head, bias=False):
        return token_cross_entropy(rows, head.weight, targets)
    return _called_losses(head, rows, targets, 0.0)


def _called_losses(head: nn.Linear, rows: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    logits = project(rows, head)[0].to(compute_dtype(rows))
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    # Without the condition, its gradient would keep all logits a second time.
    return losses + z_loss * logits.logsumexp(-1).square() * (targets != IGNORED) if z_loss else losses
