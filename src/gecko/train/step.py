"""One optimizer step: gradients of a batch computed in parts, clipped, applied."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gecko.data import IGNORED, Batch
from gecko.model import Gecko
from gecko.train.optimizer import set_learning_rate
from gecko.train.run import Precision


@dataclass(frozen=True)
class Part:
    """Some rows of a batch on the device. ``weight`` is their part of the batch's targets; all parts' sum is 1."""

    tokens: Tensor
    targets: Tensor
    segment_ids: Tensor
    weight: float


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean over the batch's targets, nats a token, before the step."""
    grad_norm: float
    """Before clipping."""
    finite: bool
    """False: the parameters were left as they were."""


def split_batch(batch: Batch, parts: int, device: torch.device) -> list[Part]:
    """``parts`` equal groups of rows. Each weighs what it has of the targets, so their sum is the batch's mean."""
    columns = [
        column.to(device, non_blocking=True).chunk(parts) for column in (batch.tokens, batch.targets, batch.segment_ids)
    ]
    counts = [int((targets != IGNORED).sum()) for targets in batch.targets.chunk(parts)]
    if not any(counts):
        raise ValueError(f"a batch must have at least one target; all are {IGNORED}. Try a larger sequence_length.")
    return [
        Part(tokens, targets, segment_ids, count / sum(counts))
        for tokens, targets, segment_ids, count in zip(*columns, counts, strict=True)
        if count
    ]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def compute_gradients(model: Gecko, parts: Sequence[Part], precision: Precision) -> Tensor:
    """Add the gradients of the batch's mean loss to the parameters' ``grad``; the loss, float32, on the device."""
    total = torch.zeros((), device=parts[0].tokens.device)
    for part in parts:
        with autocast(precision, part.tokens.device):
            loss = model.loss(part.tokens, part.targets, part.segment_ids) * part.weight
        torch.autograd.backward(loss)
        total += loss.detach()
    return total


def train_step(
    model: Gecko,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Part],
    *,
    learning_rate: float,
    clip: float,
    precision: Precision,
) -> StepResult:
    """One step of AdamW on the batch; skipped, parameters and optimizer untouched, where anything is not finite."""
    optimizer.zero_grad(set_to_none=True)
    loss = compute_gradients(model, parts, precision)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    finite = bool(torch.isfinite(loss) & torch.isfinite(grad_norm))
    if finite:
        set_learning_rate(optimizer, learning_rate)
        optimizer.step()
    return StepResult(float(loss), float(grad_norm), finite)
