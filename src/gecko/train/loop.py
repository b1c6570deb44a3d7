"""The training loop: steps, held-out losses and checkpoints until the end, or until asked to stop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from gecko.data import PackedLoader
from gecko.model import Gecko
from gecko.train.evaluate import HeldOut, evaluate
from gecko.train.metrics import MetricsWriter
from gecko.train.nonfinite import SkipCounter, find_nonfinite
from gecko.train.progress import TrainingProgress
from gecko.train.run import Run
from gecko.train.schedule import learning_rate_factor
from gecko.train.signals import StopSignal
from gecko.train.snapshot import Position, save_snapshot
from gecko.train.step import Part, StepResult, compute_gradients, split_batch, train_step


class Trainer:
    """A model on its way through a run whose ``steps`` are fixed."""

    def __init__(
        self,
        run: Run,
        model: Gecko,
        optimizer: torch.optim.Optimizer,
        loader: PackedLoader,
        held_out: HeldOut,
        position: Position,
        *,
        metrics: MetricsWriter,
        display: TrainingProgress,
    ) -> None:
        if run.steps is None:
            raise ValueError("the number of steps must be fixed before training; got steps=None.")
        self.run, self.steps = run, run.steps
        self.model, self.optimizer = model, optimizer
        self.loader, self.held_out = loader, held_out
        self.position = position
        self.metrics, self.display = metrics, display
        self.device = next(model.parameters()).device
        self._skips = SkipCounter(run.max_skips, position.consecutive_skips)
        self._saved: int | None = position.step or None

    def fit(self, stop: StopSignal) -> None:
        """Train to the last step, or to the step in which ``stop`` is requested; either way end with a checkpoint."""
        if self.position == Position():
            self._evaluate()
        while self.position.step < self.steps and not stop.requested:
            self._step()
            if self._due(self.run.evaluation.every):
                self._evaluate()
            if self._due(self.run.checkpoint.every):
                self._save()
        if self._saved != self.position.step:
            self._save()

    def _due(self, every: int) -> bool:
        return self.position.step % every == 0 or self.position.step == self.steps

    def _step(self) -> None:
        begin, step = time.perf_counter(), self.position.step
        rate = self.run.optimizer.learning_rate * learning_rate_factor(self.run.schedule, step, self.steps)
        parts = split_batch(self.loader.batch(step), self.run.accumulation, self.device)
        result = train_step(
            self.model,
            self.optimizer,
            parts,
            learning_rate=rate,
            clip=self.run.optimizer.clip,
            precision=self.run.precision,
        )
        cause = None if result.finite else self._find_cause(parts)
        seconds = time.perf_counter() - begin
        self._advance(seconds, skipped=cause is not None)
        self._report(result, rate, seconds, cause)
        self._skips.record(self.position.step, cause)

    def _find_cause(self, parts: Sequence[Part]) -> str:
        return find_nonfinite(self.model, lambda: compute_gradients(self.model, parts, self.run.precision))

    def _advance(self, seconds: float, *, skipped: bool) -> None:
        old = self.position
        self.position = Position(
            step=old.step + 1,
            seconds=old.seconds + seconds,
            skipped=old.skipped + skipped,
            consecutive_skips=old.consecutive_skips + 1 if skipped else 0,
        )

    def _report(self, result: StepResult, rate: float, seconds: float, cause: str | None) -> None:
        step, speed = self.position.step, self.run.tokens_per_step / seconds
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "tokens_per_second": speed,
            "seconds": self.position.seconds,
        }
        self.metrics.write("train", step, values if cause is None else {**values, "skipped": cause})
        self.display.update(step, result.loss, speed)
        if cause is not None:
            self.display.say(f"step {step} skipped: {cause}")

    def _evaluate(self) -> None:
        begin = time.perf_counter()
        result = evaluate(self.model, self.held_out, self.run.precision)
        seconds = self.position.seconds + time.perf_counter() - begin
        self.position = dataclasses.replace(self.position, seconds=seconds)
        self.metrics.write("validation", self.position.step, dataclasses.asdict(result))
        self.display.say(f"step {self.position.step} of {self.steps}: held-out loss {result.loss:.4f} nats a token")

    def _save(self) -> None:
        save_snapshot(self.run, self.model, self.optimizer, self.position)
        self._saved = self.position.step
