"""The training loop: steps, held-out losses and checkpoints until the end, or until asked to stop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gecko.baselines import LanguageModel
from gecko.parallel.mesh import Ranks
from gecko.train.batches import Batches
from gecko.train.evaluate import HeldOut, evaluate
from gecko.train.metrics import Kind, MetricsWriter
from gecko.train.nonfinite import check_skips, find_nonfinite
from gecko.train.profiling import ProfileWindow
from gecko.train.progress import TrainingProgress
from gecko.train.run import Run
from gecko.train.saver import Saver
from gecko.train.schedule import learning_rate_factor
from gecko.train.signals import StopSignal
from gecko.train.snapshot import Position
from gecko.train.spikes import SpikeRule
from gecko.train.step import Part, StepResult, compute_gradients, split_batch, train_step
from gecko.train.utilisation import Speedometer, memory_gib


@dataclass(frozen=True)
class Outlets:
    """Where a run's numbers and checkpoints go."""

    saver: Saver
    display: TrainingProgress
    metrics: MetricsWriter | None
    """None on all ranks but the first."""
    beat: Callable[[], None]
    """Tells the watchdog, if there is one, that there is progress."""


class Trainer:
    """A model on its way through a run whose ``steps`` are fixed; one on every rank, all in step."""

    def __init__(
        self,
        run: Run,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        held_out: HeldOut,
        position: Position,
        outlets: Outlets,
        ranks: Ranks,
    ) -> None:
        if run.steps is None:
            raise ValueError("the number of steps must be fixed before training; got steps=None.")
        self.run, self.steps = run, run.steps
        self.model, self.optimizer = model, optimizer
        self.batches, self.held_out = batches, held_out
        self.position = position
        self.outlets, self.ranks = outlets, ranks
        self.device = next(model.parameters()).device
        self._spikes = SpikeRule(run.skip, position.recent_losses, position.recent_grad_norms)
        self._profile = ProfileWindow(run.profile, run.folder / "profile", ranks.rank)
        self._speed = Speedometer(run, self.device, ranks.world)
        self._saved: int | None = position.step or None

    def fit(self, stop: StopSignal) -> None:
        """Train to the last step, or to the step in which ``stop`` is requested; either way end with a checkpoint."""
        if self.position == Position():
            self._evaluate()
        while self._goes_on(stop):
            with self._profile.step(self.position.step + 1):
                self._step()
            if self._due(self.run.evaluation.every):
                self._evaluate()
            if self._due(self.run.checkpoint.every):
                self._save()
        self._profile.finish()
        if self._saved != self.position.step:
            self._save()
        self.outlets.saver.wait()

    def _goes_on(self, stop: StopSignal) -> bool:
        """Whether there are steps left, none of the ranks was asked to stop, and all saves went well so far."""
        self.outlets.beat()
        stopped, failed = self.ranks.sum(torch.tensor([stop.requested is not None, self.outlets.saver.failed]).int())
        if failed:
            self.outlets.saver.wait()
        return not stopped and self.position.step < self.steps

    def _due(self, every: int) -> bool:
        return self.position.step % every == 0 or self.position.step == self.steps

    def _step(self) -> None:
        begin, step = time.perf_counter(), self.position.step
        rate = self.run.optimizer.learning_rate * learning_rate_factor(self.run.schedule, step, self.steps)
        batch = self.batches.batch(step)
        waited = time.perf_counter() - begin
        parts = split_batch(batch, self.run.accumulation, self.device, self.ranks)
        result = train_step(
            self.model,
            self.optimizer,
            parts,
            learning_rate=rate,
            clip=self.run.optimizer.clip,
            precision=self.run.precision,
            ranks=self.ranks,
            rule=self._spikes,
        )
        cause = result.spike if result.finite else self._find_cause(parts)
        seconds = time.perf_counter() - begin
        self._advance(seconds, skipped=cause is not None)
        self._report(result, rate, seconds, waited, cause)
        if cause is not None:
            skips, limit = self.position.consecutive_skips, self.run.max_skips
            self.ranks.agree(partial(check_skips, self.position.step, skips, limit, cause))

    def _find_cause(self, parts: Sequence[Part]) -> str:
        precision, ranks = self.run.precision, self.ranks
        return find_nonfinite(self.model, lambda: compute_gradients(self.model, parts, precision, ranks), ranks)

    def _advance(self, seconds: float, *, skipped: bool) -> None:
        old = self.position
        self.position = Position(
            step=old.step + 1,
            seconds=old.seconds + seconds,
            skipped=old.skipped + skipped,
            consecutive_skips=old.consecutive_skips + 1 if skipped else 0,
            recent_losses=tuple(self._spikes.losses),
            recent_grad_norms=tuple(self._spikes.grad_norms),
        )

    def _report(self, result: StepResult, rate: float, seconds: float, waited: float, cause: str | None) -> None:
        step, speed = self.position.step, self.run.tokens_per_step / seconds
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "tokens_per_second": speed,
            "mfu": self._speed.utilisation(speed),
            "memory_gib": memory_gib(self.device),
            "data_seconds": waited,
            "seconds": self.position.seconds,
            "skips": self.position.skipped,
        }
        self._write("train", values if cause is None else {**values, "skipped": cause})
        self.outlets.display.update(step, result.loss, speed)
        if cause is not None:
            self.outlets.display.say(f"step {step} skipped: {cause}")

    def _write(self, kind: Kind, values: Mapping[str, Any]) -> None:
        if self.outlets.metrics is not None:
            self.outlets.metrics.write(kind, self.position.step, values)

    def _evaluate(self) -> None:
        begin = time.perf_counter()
        result = evaluate(self.model, self.held_out, self.run.precision, self.ranks, self.outlets.beat)
        seconds = self.position.seconds + time.perf_counter() - begin
        self.position = dataclasses.replace(self.position, seconds=seconds)
        self._write("validation", dataclasses.asdict(result))
        self.outlets.display.say(
            f"step {self.position.step} of {self.steps}: held-out loss {result.loss:.4f} nats a token"
        )

    def _save(self) -> None:
        self.outlets.beat()
        self.ranks.agree(self._flush_metrics)
        self.outlets.saver.save(self.model, self.optimizer, self.position)
        self._saved = self.position.step

    def _flush_metrics(self) -> None:
        if self.outlets.metrics is not None:
            self.outlets.metrics.flush()
