"""One optimizer step: gradient accumulation, clipping, spike detection and the learning-rate schedule."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gecko.data import IGNORED, Batch
from gecko.models import LanguageModel
from gecko.parallel.fsdp import synchronise_gradients, whole
from gecko.parallel.mesh import Ranks
from gecko.train.carried import CarriedState
from gecko.train.optimizers.build import set_learning_rate
from gecko.train.optimizers.settings import ScheduleSettings
from gecko.train.run import Precision, SkipSettings


def learning_rate_factor(schedule: ScheduleSettings, step: int, steps: int) -> float:
    """Return the factor of the peak learning rate in step ``step`` of ``0 .. steps - 1``.

    Warm-up rises linearly from ``1 / warmup_steps`` to 1. After it the factor is in ``[final, 1]``. With p from 0
    towards 1 over the decay, ``cosine`` is ``final + (1 - final) (1 + cos πp) / 2``; ``wsd`` stays at 1 and then
    decays as ``1 - (1 - final) p``.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step must lie in 0..{steps - 1}; got {step}.")
    warmup = round(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "cosine":
        progress = (step - warmup) / (steps - warmup)
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * progress)) / 2
    decay = round(schedule.decay * steps)
    progress = max(0, step - (steps - decay)) / max(1, decay)
    return 1 - (1 - schedule.final) * progress


class SpikeRule:
    """Detects spikes: steps whose loss or gradient norm is far above the mean of the last steps.

    Spikes enter the mean like other steps. If the loss stays higher, later steps are soon no longer spikes.
    """

    def __init__(self, settings: SkipSettings, losses: Iterable[float] = (), grad_norms: Iterable[float] = ()) -> None:
        self.settings = settings
        self.losses = deque(losses, maxlen=settings.window)
        self.grad_norms = deque(grad_norms, maxlen=settings.window)

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Add a step with finite values to the history. Return why it is a spike, or None if it is not."""
        found = self._compare("loss", loss, self.losses) or self._compare("gradient norm", grad_norm, self.grad_norms)
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        return found

    def _compare(self, name: str, value: float, before: deque[float]) -> str | None:
        limit = self.settings.deviations
        if limit is None or len(before) < max(2, self.settings.window // 2):
            return None
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        if value - mean <= limit * deviation:
            return None
        return (
            f"the {name} {value:.4g} is more than {limit:g} standard deviations of {deviation:.3g} "
            f"above the mean {mean:.4g} of the last {len(before)} steps"
        )


_ALONE = Ranks()


@dataclass(frozen=True)
class Part:
    """This rank's tokens of some rows of a batch, on the device.

    ``weight`` is the fraction of the batch's targets in these rows; the sum over all parts and data ranks is 1.
    """

    tokens: Tensor
    targets: Tensor
    segment_ids: Tensor
    weight: float


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean over the batch's targets before the step, in nats per token."""
    grad_norm: float
    """Gradient norm before clipping."""
    finite: bool
    """Whether loss and gradient norm are finite; if not, the step was skipped."""
    spike: str | None = None
    """Why the step was a spike, and so was skipped; None if it was not."""


def split_batch(batch: Batch, parts: int, device: torch.device, ranks: Ranks = _ALONE) -> list[Part]:
    """Split ``batch``, which holds this rank's rows in full, into ``parts`` equal parts with this rank's columns."""
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
    model: LanguageModel,
    parts: Sequence[Part],
    precision: Precision,
    ranks: Ranks = _ALONE,
    carried: CarriedState | None = None,
) -> float:
    """Add the gradients of the mean loss over all ranks' parts to the parameters' ``grad``, and return that loss.

    With ``carried`` the rows of the parts follow its states.
    """
    total = torch.zeros((), dtype=torch.float64, device=parts[0].tokens.device)
    for number, part in enumerate(parts):
        synchronise_gradients(model, part is parts[-1])
        with autocast(precision, part.tokens.device):
            given = part.tokens, part.targets, part.segment_ids
            mean = model.loss(*given, ranks.context) if carried is None else carried.loss(number, *given)
            loss = mean * part.weight
        # FSDP averages gradients over the ranks. The factor turns the average into the sum, which is the gradient.
        torch.autograd.backward(loss * ranks.world)
        total += loss.detach()
    # Ranks that share rows have the same loss.
    return float(ranks.sum(total.cpu())) / ranks.sizes.context


def _clip(model: nn.Module, clip: float, ranks: Ranks) -> float:
    """Clip the gradients to the norm ``clip``. Return their norm before clipping, identical on all ranks."""
    norm = whole(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    # Each replica computes its own sum, and NCCL may round differently in each; different factors would let them drift.
    shared = ranks.broadcast(float(norm))
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
    carried: CarriedState | None = None,
) -> StepResult:
    """Run one step of the optimizer on the batch. All ranks call it together.

    If the loss or the gradient norm is not finite, or a spike by ``rule``, parameters and optimizer do not change.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = compute_gradients(model, parts, precision, ranks, carried)
    grad_norm = _clip(model, clip, ranks)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    spike = rule.judge(loss, grad_norm) if finite and rule is not None else None
    if finite and spike is None:
        set_learning_rate(optimizer, learning_rate)
        optimizer.step()
    return StepResult(loss, grad_norm, finite, spike)
