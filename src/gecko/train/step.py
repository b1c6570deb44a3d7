"""One optimizer step: gradient accumulation, carried states, clipping, spike detection and the learning-rate schedule.

The device decides whether a step changes the model. The host reads the numbers later, and never waits for the device
between a batch and the optimizer.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from gecko.data import IGNORED, Batch
from gecko.models import LanguageModel
from gecko.models.gecko import Gecko
from gecko.parallel.context import ContextGroup
from gecko.parallel.mesh import ALONE, Ranks
from gecko.parallel.sharding import local, sum_over_replicas, whole
from gecko.runtime.tensors import HostCopy, to_device
from gecko.state import GeckoState
from gecko.train.optimizer import set_learning_rate, step_unless
from gecko.train.run import Precision, Run, is_half
from gecko.train.settings import ScheduleSettings, SkipSettings


def learning_rate_factor(schedule: ScheduleSettings, step: int, steps: int | None) -> float:
    """Return the factor of the peak learning rate in step ``step`` of ``0 .. steps - 1``: a linear warm-up to 1, then,
    with p from 0 towards 1 over the decay, ``final + (1 - final) (1 + cos πp) / 2`` for ``cosine``; ``wsd`` stays at 1,
    then decays as ``1 - (1 - final) p``, which bounds a warm-up that is still going on.

    ``steps`` is None before the end of a run that follows the clock is fixed: there is no decay, and the warm-up has a
    number of steps.
    """
    if step < 0 or (steps is not None and step >= steps):
        raise ValueError(f"step must lie in 0..{'' if steps is None else steps - 1}; got {step}.")
    warmup = schedule.warmup_steps
    if warmup is None:
        assert steps is not None, "a run that follows the clock fixes the steps of its warm-up when it starts"
        warmup = round(schedule.warmup * steps)
    rising = (step + 1) / warmup if step < warmup else 1.0
    if steps is None or (schedule.kind != "wsd" and step < warmup):
        return rising
    if schedule.kind != "wsd":
        progress = (step - warmup) / (steps - warmup)
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * progress)) / 2
    decay = round(schedule.decay * steps) if schedule.decay_steps is None else min(schedule.decay_steps, steps)
    progress = max(0, step - (steps - decay)) / max(1, decay)
    return min(rising, 1 - (1 - schedule.final) * progress)


class Verdict(IntEnum):
    """Whether a step changes the model."""

    TAKEN = 0
    NOT_FINITE = 1
    """Skipped: loss or gradient norm is not finite."""
    LOSS_SPIKE = 2
    """Skipped: the loss is a spike."""
    NORM_SPIKE = 3
    """Skipped: the gradient norm is a spike."""
    HELD = 4
    """Skipped, because an earlier step was skipped and the host did not know it yet: the step is computed again."""


class SpikeRule:
    """Rule that skips steps that are not finite, and spikes: loss or gradient norm far above the mean of the last ones.

    Spikes enter the mean: if the loss stays higher, later steps are soon no longer spikes. ``device`` decides, with its
    own copy of the last values. After a skipped step all steps are held until ``release``.
    """

    def __init__(
        self, settings: SkipSettings, losses: Iterable[float] = (), grad_norms: Iterable[float] = (),
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.settings = settings
        self.losses, self.grad_norms = (deque(values, maxlen=settings.window) for values in (losses, grad_norms))
        known = torch.full((2, settings.window), math.nan, dtype=torch.float64, device="cpu")
        for row, values in zip(known, (self.losses, self.grad_norms), strict=True):
            row[settings.window - len(values) :] = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        self._known = to_device(known, device)
        """The last values, oldest first; NaN where there are none."""
        self._held = torch.zeros((), dtype=torch.bool, device=device)

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return the verdict of a step as a tensor of the device; the values of a finite step enter the mean."""
        values = torch.stack([loss.double(), grad_norm.double()])
        shifted = torch.cat([self._known[:, 1:], values[:, None]], dim=1)
        kept = torch.where(values.isfinite().all() & ~self._held, shifted, self._known)
        verdict = torch.where(self._held, Verdict.HELD, self._verdict(values))
        self._known, self._held = kept, verdict != Verdict.TAKEN
        return verdict

    def release(self) -> None:
        """Let steps change the model again: the host knows of the skipped step."""
        self._held = torch.zeros_like(self._held)

    def record(self, result: StepResult) -> str | None:
        """Remember the values of a finite step on the host. Return why it was a spike, or None if it was not."""
        if result.verdict is Verdict.NOT_FINITE:
            return None
        found = None
        for verdict, name, value, before in (
            (Verdict.LOSS_SPIKE, "loss", result.loss, self.losses),
            (Verdict.NORM_SPIKE, "gradient norm", result.grad_norm, self.grad_norms),
        ):
            found = self._explain(name, value, before) if result.verdict is verdict else found
            before.append(value)
        return found

    def _explain(self, name: str, value: float, before: deque[float]) -> str:
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        return (
            f"the {name} {value:.4g} is more than {self.settings.deviations:g} standard deviations of {deviation:.3g} "
            f"above the mean {mean:.4g} of the last {len(before)} steps"
        )

    def _verdict(self, values: Tensor) -> Tensor:
        """Return the verdict on a step with loss and gradient norm (2,) if none is held."""
        limit, known = self.settings.deviations, ~self._known.isnan()
        if limit is None:
            return torch.where(values.isfinite().all(), Verdict.TAKEN, Verdict.NOT_FINITE)
        count, last = known.sum(1), self._known[:, -1]
        # Distances from the last value: that of equal values is exactly 0, and so is their deviation.
        apart = torch.where(known, self._known - last[:, None], 0.0)
        mean = apart.sum(1) / count
        deviation = (torch.where(known, apart - mean[:, None], 0.0).square().sum(1) / (count - 1)).sqrt()
        loss, norm = (count >= max(2, self.settings.window // 2)) & (values - last - mean > limit * deviation)
        spike = torch.where(loss, Verdict.LOSS_SPIKE, torch.where(norm, Verdict.NORM_SPIKE, Verdict.TAKEN))
        return torch.where(values.isfinite().all(), spike, Verdict.NOT_FINITE)


NO_TARGETS = f"a batch must have at least one target; all are {IGNORED}. Try a larger sequence_length."


@dataclass(frozen=True)
class BatchPart:
    """This rank's tokens of some rows of a batch."""

    tokens: Tensor
    """(B, T) on the device."""
    targets: Tensor
    """(B, T) on the device."""
    segment_ids: Tensor
    """(B, T) on the CPU, from which the host lays out the documents."""
    weight: Tensor
    """() float64 on the device: the fraction of the batch's targets in these rows. The sum over all parts and data
    ranks is 1; NaN if the batch has no targets."""
    context: ContextGroup | None = None
    """The ranks that share the rows; None if this rank has whole rows."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean over the batch's targets before the step, in nats per token."""
    grad_norm: float
    """Gradient norm before clipping."""
    verdict: Verdict


class StartedStep:
    """A step that the device computes."""

    def __init__(self, loss: Tensor, grad_norm: Tensor, verdict: Tensor) -> None:
        self._numbers = HostCopy(torch.stack([loss.double(), grad_norm.double(), verdict.double()]))

    def wait(self) -> StepResult:
        """Return the step's numbers, as soon as the device has computed them."""
        loss, grad_norm, verdict = self._numbers.wait().tolist()
        return StepResult(loss, grad_norm, Verdict(int(verdict)))


def split_batch(batch: Batch, parts: int, device: torch.device, ranks: Ranks = ALONE) -> list[BatchPart]:
    """Split ``batch``, which holds this rank's rows in full, into ``parts`` equal parts with this rank's columns.
    ValueError if the rows of a single rank have no targets; several ranks learn this on the device only."""
    here = ranks.columns(batch.tokens.shape[1])
    tokens, targets = (to_device(x[:, here], device).chunk(parts) for x in (batch.tokens, batch.targets))
    # NumPy counts on the host.
    counts = (batch.targets.numpy() != IGNORED).reshape(parts, -1).sum(axis=1, dtype=np.float64)
    if ranks.world == 1 and not counts.any():
        raise ValueError(NO_TARGETS)
    on_device = to_device(torch.from_numpy(counts), device)
    weights = on_device / (ranks.sum_on_device(on_device.sum()) / ranks.sizes.context)
    rows = batch.segment_ids.chunk(parts)
    contexts = [None if ranks.context is None else ranks.context.of_rows(ids) for ids in rows]
    columns = tokens, targets, (ids[:, here] for ids in rows), weights.unbind(), contexts
    return [BatchPart(*given) for given in zip(*columns, strict=True)]


_PREFIX = "lanes/"
"""Start of the names of states in a checkpoint. Names of parameters have no slash."""


class CarriedState:
    """State that is carried from each step to the next: truncated backpropagation through time.

    Lane i is row i of every batch. Its rows are consecutive in a text (``LaneRows``), so the state after a row is that
    before the lane's next row. A rank holds the states of the lanes whose rows it reads, for each accumulated part of a
    step. A skipped step empties them: what made it bad may be in them. All tensors keep the dtypes of the empty state,
    so that a resumed run continues with the same numbers.
    """

    def __init__(self, run: Run, model: Gecko, ranks: Ranks) -> None:
        self._model, self._ranks, self._parts = model, ranks, run.gradient_accumulation_steps
        self._lanes = run.rows_per_rank(ranks.data_ranks)
        weight = model.embedding.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._empty = GeckoState.empty(model.config, self._lanes, dtype=dtype, device=weight.device)
        self.before = self._divided(self._empty)
        """States before the next step, for each part."""
        self._after: dict[int, GeckoState] = {}

    def loss(
        self, part: int, tokens: Tensor, targets: Tensor, segment_ids: Tensor, context: ContextGroup | None = None
    ) -> Tensor:
        """Return the mean loss of the rows of a part, read after the states of its lanes; keep the states after it."""
        before = self.before[part]
        loss, state = self._model.loss_and_state(tokens, targets, segment_ids, before, context)
        state = state.map(torch.Tensor.detach)
        if context is not None:
            state = context.last_state(state, before.clock)
        dtypes = iter(x.dtype for x in self._empty.tensors().values())
        # A copy: the state may be a view of activations, which would stay in memory.
        self._after[part] = state.map(lambda x: x.to(next(dtypes), copy=True))
        return loss

    def advance(self) -> None:
        """Take the states after the last step as those before the next one."""
        self.before, self._after = [self._after[part] for part in range(self._parts)], {}

    def clear(self) -> None:
        """Take empty states as those before the next step, after a skipped one."""
        self.before, self._after = self._divided(self._empty), {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the states of all lanes by name, (lanes of the batch, ...); sharded if there are several ranks."""
        mesh, found = self._ranks.mesh, GeckoState.stack(self.before).tensors()
        if mesh is not None:
            # The clock is on the CPU, where a mesh of GPUs has no tensors.
            places = [Shard(0), Shard(0), Replicate()]
            kind = mesh.device_type
            found = {name: DTensor.from_local(x.to(kind), mesh, places, run_check=False) for name, x in found.items()}
        return {_PREFIX + name: x for name, x in found.items()}

    def restore(self, read: Callable[[dict[str, Tensor]], None]) -> None:
        """Replace the states by those of a checkpoint, which ``read`` copies into tensors like ``tensors``."""
        tensors = {name: x.clone() for name, x in self.tensors().items()}
        read(tensors)
        found = iter(map(local, tensors.values()))
        restored = self._empty.map(lambda x: next(found).to(x.device))
        restored.check_counts("the lanes of a checkpoint")
        self.before = self._divided(restored)

    def _divided(self, state: GeckoState) -> list[GeckoState]:
        return [state.rows(lanes.tolist()) for lanes in torch.arange(self._lanes, device="cpu").chunk(self._parts)]


def carried_state(run: Run, model: LanguageModel, ranks: Ranks) -> CarriedState | None:
    """Return the state that the run carries, or None if it carries none."""
    return CarriedState(run, model, ranks) if run.data.carry_state and isinstance(model, Gecko) else None


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_half(precision))


def compute_gradients(
    model: LanguageModel, parts: Sequence[BatchPart], precision: Precision, ranks: Ranks = ALONE,
    carried: CarriedState | None = None,
) -> Tensor:  # fmt: skip
    """Add the gradients of the mean loss over all ranks' parts to the parameters' ``grad``, and return that loss,
    () float64 on the device. With ``carried`` the rows of the parts follow its states."""
    total = torch.zeros((), dtype=torch.float64, device=parts[0].tokens.device)
    for number, part in enumerate(parts):
        sum_over_replicas(model, part is parts[-1])
        with autocast(precision, part.tokens.device):
            given = part.tokens, part.targets, part.segment_ids, part.context
            mean = model.loss(*given) if carried is None else carried.loss(number, *given)
        total += add_gradients(mean, part.weight, ranks.world)
    # Ranks that share rows have the same loss.
    return ranks.sum_on_device(total) / ranks.sizes.context


def add_gradients(mean: Tensor, weight: Tensor, world: int = 1) -> Tensor:
    """Add the gradients of ``weight`` times the mean loss of a part to the parameters' ``grad``; return the product."""
    loss = mean * weight.to(mean.dtype)
    # FSDP averages gradients over the ranks. The factor turns the average into the sum, which is the gradient.
    torch.autograd.backward(loss * world)
    return loss.detach()


@dataclass(frozen=True)
class Step:
    """A step of the optimizer, which is started on each batch. All ranks call it together."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    clip: float
    precision: Precision
    rule: SpikeRule | None = None
    """If it skips a step, parameters and optimizer do not change. None: steps that are not finite are skipped."""
    ranks: Ranks = ALONE
    carried: CarriedState | None = None
    captured: Callable[[Sequence[BatchPart]], Tensor] | None = None
    """Computes loss and gradients in the place of ``compute_gradients``, by captured graphs."""

    def start(self, parts: Sequence[BatchPart], learning_rate: float) -> StartedStep:
        """Start the step on a batch; the host waits for nothing."""
        rule = self.rule or SpikeRule(SkipSettings(deviations=None), device=parts[0].tokens.device)
        if self.captured is None:
            self.optimizer.zero_grad(set_to_none=True)
            loss = compute_gradients(self.model, parts, self.precision, self.ranks, self.carried)
        else:
            loss = self.captured(parts)
        norm = whole(nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        # Each replica computes its own sum, and NCCL may round differently in each: by other factors they would drift.
        grad_norm = self.ranks.of_first_replica(norm)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, grad_norm)
        verdict = rule.judge(loss, grad_norm)
        set_learning_rate(self.optimizer, learning_rate)
        step_unless(self.optimizer, verdict != Verdict.TAKEN)
        return StartedStep(loss, grad_norm, verdict)
