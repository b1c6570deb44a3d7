"""One optimizer step: gradients of a batch computed in parts, clipped, applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gecko.baselines import LanguageModel
from gecko.data import IGNORED, Batch
from gecko.parallel.fsdp import synchronise_gradients, whole
from gecko.parallel.mesh import Ranks
from gecko.train.optimizer import set_learning_rate
from gecko.train.run import Precision
from gecko.train.spikes import SpikeRule

_ALONE = Ranks()


@dataclass(frozen=True)
class Part:
    """This rank's tokens of some rows of a batch, on the device.

    ``weight`` is the rows' part of the batch's targets; the sum over all parts and data ranks is 1.
    """

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
    """False: the parameters were left as they were, ..."""
    spike: str | None = None
    """... as where this says why the step was one."""


def split_batch(batch: Batch, parts: int, device: torch.device, ranks: Ranks = _ALONE) -> list[Part]:
    """``parts`` equal groups of this rank's rows, which ``batch`` holds whole."""
    here = ranks.columns(batch.tokens.shape[1])
    columns = [
        column[:, here].to(device, non_blocking=True).chunk(parts)
        for column in (batch.tokens, batch.targets, batch.segment_ids)
    ]
    counts = [int((targets != IGNORED).sum()) for targets in batch.targets.chunk(parts)]
    total = int(ranks.sum(torch.tensor(sum(counts)))) // ranks.sizes.context
    if not total:
        raise ValueError(f"a batch must have at least one target; all are {IGNORED}. Try a larger sequence_length.")
    return [
        Part(tokens, targets, segment_ids, count / total)
        for tokens, targets, segment_ids, count in zip(*columns, counts, strict=True)
    ]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def compute_gradients(
    model: LanguageModel, parts: Sequence[Part], precision: Precision, ranks: Ranks = _ALONE
) -> float:
    """Add the gradients of the mean loss over all ranks' parts to the parameters' ``grad``; that loss."""
    total = torch.zeros((), dtype=torch.float64, device=parts[0].tokens.device)
    for part in parts:
        synchronise_gradients(model, part is parts[-1])
        with autocast(precision, part.tokens.device):
            loss = model.loss(part.tokens, part.targets, part.segment_ids, ranks.context) * part.weight
        # FSDP averages gradients over the ranks; here each rank has a part of the sum.
        torch.autograd.backward(loss * ranks.world)
        total += loss.detach()
    # Ranks that share rows have the same loss.
    return float(ranks.sum(total.cpu())) / ranks.sizes.context


def _clip(model: nn.Module, clip: float, ranks: Ranks) -> float:
    """Scale gradients of a norm above ``clip``; their norm before, the same bits on all ranks."""
    norm = whole(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    # Each replica adds up by itself, and NCCL need not round alike in all: with factors of their own they would drift.
    shared = ranks.share(float(norm))
    nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm.new_tensor(shared))
    return shared


def train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Part],
    *,
    learning_rate: float,
    clip: float,
    precision: Precision,
    ranks: Ranks = _ALONE,
    rule: SpikeRule | None = None,
) -> StepResult:
    """One step of AdamW on the batch, by all ranks together.

    Skipped, parameters and optimizer untouched, where anything is not finite, or a spike by ``rule``.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = compute_gradients(model, parts, precision, ranks)
    grad_norm = _clip(model, clip, ranks)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    spike = rule.judge(loss, grad_norm) if finite and rule is not None else None
    if finite and spike is None:
        set_learning_rate(optimizer, learning_rate)
        optimizer.step()
    return StepResult(loss, grad_norm, finite, spike)
