"""The training loop: steps, held-out losses and checkpoints until the last step or a request to stop.

The host reads the numbers of a step after it started the next one, so the device always has work. If the step was
skipped, the device has held the next one, which is then computed again: losses and weights are those of a loop that
waits for each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gecko.models import LanguageModel
from gecko.parallel.mesh import DelayedSum, Ranks
from gecko.runtime.process import SteadyCollection
from gecko.runtime.tensors import memory_gib
from gecko.state import GeckoState
from gecko.train.budget import RunClock
from gecko.train.capture import CapturedGradients
from gecko.train.checkpoints import Checkpointer, set_aside
from gecko.train.data import Prefetcher
from gecko.train.evaluate import HeldOut, evaluate
from gecko.train.health import NonFiniteError, StopSignal, find_nonfinite, first_nonfinite
from gecko.train.metrics import MetricsWriter
from gecko.train.run import Run
from gecko.train.state import NodeCopies, TrainerState, training_tensors
from gecko.train.step import (
    NO_TARGETS,
    BatchPart,
    CarriedState,
    SpikeRule,
    StartedStep,
    Step,
    StepResult,
    Verdict,
    compute_gradients,
    learning_rate_factor,
    split_batch,
)
from gecko.train.throughput import ProfileWindow, mfu_per_speed


@dataclass
class _InFlight:
    """A step that was started and whose numbers the host has not read."""

    started: StartedStep
    parts: list[BatchPart]
    states: list[GeckoState] | None
    """States that were carried into the step."""
    rate: float
    waited: float
    """Seconds spent waiting for the batch."""
    seconds: float = 0.0


@dataclass
class Trainer:
    """Training loop of a run; all ranks call it together. Without a number of steps, the first rank's ``clock`` says
    when the decay begins, which fixes the number."""

    run: Run
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    carried: CarriedState | None
    position: TrainerState
    batches: Prefetcher
    held_out: HeldOut
    ranks: Ranks
    clock: RunClock
    saver: Checkpointer
    display: Progress
    """Bar of one task; its console prints messages."""
    metrics: MetricsWriter | None
    """None on all ranks but the first."""
    beat: Callable[[], None]
    """Reports progress to the watchdog, if there is one."""
    copies: NodeCopies | None
    """None without copies in the memory of the nodes."""

    def __post_init__(self) -> None:
        run, position = self.run, self.position
        self.device = next(self.model.parameters()).device
        self._spikes = SpikeRule(run.skip, position.recent_losses, position.recent_grad_norms, self.device)
        captured = CapturedGradients(self.model, run.precision, self.ranks) if run.capture else None
        common = self.model, self.optimizer, run.optimizer.clip, run.precision
        self._optimizer_step = Step(*common, self._spikes, self.ranks, self.carried, captured)
        self._flags = DelayedSum(self.ranks)
        self._pending: _InFlight | None = None
        self._mark: float | None = None
        """Time up to which steps have been timed; None if no step is being timed."""
        self._profile = ProfileWindow(run.profile, run.folder / "profile", self.ranks.rank)
        self._mfu_per_speed = mfu_per_speed(run, self.device, self.ranks.world)
        self._saved: int | None = position.step or None
        self._overdue = False
        """Whether a checkpoint was due during a streak of skipped steps."""
        self._unproven = self._saved is not None
        """Whether no step was taken since the newest checkpoint, so that its weights may have diverged."""
        self._finite_held_out = False
        """Whether the last held-out loss was finite."""

    def fit(self, stop: StopSignal) -> None:
        """Train to the last step, or finish the step in which ``stop`` is requested; then save a checkpoint."""
        if self.position == TrainerState():
            self._evaluate()
        with SteadyCollection() as garbage:
            while self._should_continue(stop):
                with self._profile.step(self.next_step):
                    self._step()
                garbage.step(self.next_step)
                if self._pending is None:
                    self._evaluate_and_save()
            self._settle()
        try:
            self._profile.finish()
        finally:  # a trace that cannot be written must not cost steps
            if self._saved != self.position.step:
                self._save()
        if self.position.step == self.run.steps and not self.position.consecutive_skips and self._finite_held_out:
            self._drop_older()
        self.saver.wait()

    @property
    def next_step(self) -> int:
        """The step that is started next, counted from 1."""
        return self.position.step + 1 + (self._pending is not None)

    def _should_continue(self, stop: StopSignal) -> bool:
        """Return whether steps are left and no rank was asked to stop; raise the error of a failed save.

        Several ranks learn a step later of a request or failure, so that no rank waits for another here.
        """
        self.beat()
        done = self.next_step - 1
        late = self.run.steps is None and self.ranks.is_main and self.clock.has_to_decay(self.run, done)
        flags = stop.requested is not None, self.saver.failed, late
        stopped, failed, decays = self._flags(torch.tensor(flags, dtype=torch.int32, device="cpu"))
        if failed:
            self.saver.wait()
        if self.run.steps is None and decays and not stopped:
            # The number of steps is on disk before a rate depends on it, so that the run resumes exactly.
            decay = self.run.schedule.decay_after(done)
            fixed = [f"steps={done + decay}", f"schedule.decay_steps={decay}"]
            if self.run.profile is not None and self.run.profile[0] > done + decay:
                fixed.append("profile=none")
            self.run = self.run.with_settings(*fixed)
            self.saver.use(self.run)
            self._say(f"step {done}: the learning rate falls from here on; the run ends after {done + decay}")
        return not stopped and (self.run.steps is None or done < self.run.steps)

    def _due(self, every: int, step: int) -> bool:
        return step % every == 0 or step == self.run.steps

    def _evaluate_and_save(self) -> None:
        step = self.position.step
        if self._due(self.run.evaluation.every, step):
            self._evaluate()
        self._overdue |= self._due(self.run.checkpoint.every, step)
        # During a streak of skipped steps the weights may be bad. The save after the loop ignores this.
        if not self.position.consecutive_skips:
            every = self.run.checkpoint.memory_every
            if self.copies is not None and every is not None and self._due(every, step):
                self.copies.save(self.model, self.optimizer, self.position)
            if self._overdue:
                self._save()

    def _step(self) -> None:
        """Start the next step, then finish the one before it, while the device computes."""
        self._mark = self._mark or self.clock.now()
        number, before = self.next_step, self._pending
        pending = self._start(number)
        if before is not None and not self._finish(before):
            # The device has held the step that was started, because the one before it was skipped.
            pending = self._start(number)
        pending.seconds, self._pending = self._lap(), pending
        # Evaluations, checkpoints and copies need the state after a step.
        intervals = self.run.evaluation.every, self.run.checkpoint.every, self.run.checkpoint.memory_every
        if self._overdue or any(every is not None and self._due(every, number) for every in intervals):
            self._settle()

    def _start(self, number: int) -> _InFlight:
        """Start the step ``number``. The host waits for nothing but the batch."""
        begin = self.clock.now()
        rate = self.run.optimizer.learning_rate * learning_rate_factor(self.run.schedule, number - 1, self.run.steps)
        batch = self.batches.batch(number - 1)
        waited = self.clock.now() - begin
        parts = split_batch(batch, self.run.gradient_accumulation_steps, self.device, self.ranks)
        states = None if self.carried is None else self.carried.before
        started = self._optimizer_step.start(parts, rate)
        if self.carried is not None:
            self.carried.advance()
        return _InFlight(started, parts, states, rate, waited)

    def _lap(self) -> float:
        """Return the seconds since the last call."""
        now = self.clock.now()
        seconds, self._mark = now - (self._mark or now), now
        return seconds

    def _settle(self) -> None:
        """Finish the last step that was started; the host waits for the device."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.started.wait()
            pending.seconds += self._lap()
            self._finish(pending)
        self._mark = None

    def _finish(self, pending: _InFlight) -> bool:
        """Read and report a step's numbers. Return whether it was taken."""
        result = pending.started.wait()
        taken = result.verdict is Verdict.TAKEN
        cause = self._spikes.record(result)
        if result.verdict is Verdict.NOT_FINITE:
            cause = self._find_cause(pending)
        if not taken:
            self._spikes.release()
            if self.carried is not None:
                self.carried.clear()
        old = self.position
        self.position = TrainerState(
            old.step + 1, old.seconds + pending.seconds, self.clock.elapsed, old.skipped + (not taken),
            0 if taken else old.consecutive_skips + 1, tuple(self._spikes.losses), tuple(self._spikes.grad_norms),
        )  # fmt: skip
        self._report(result, pending, cause)
        if taken:
            self._drop_older()
        elif self.position.consecutive_skips >= self.run.max_skips:
            last = self.position.step
            good = last - self.position.consecutive_skips
            why = f"steps {good + 1} to {last} were all skipped for their loss or gradient, and max_skips="
            self._give_up(f"{why}{self.run.max_skips}; the last: {cause}", good)
        return taken

    def _drop_older(self) -> None:
        """Remove old checkpoints, once a step was taken from the newest one."""
        if self._unproven:
            self.saver.drop_older(self._saved or 0)
            self._unproven = False

    def _give_up(self, why: str, step: int) -> NoReturn:
        """End the run. Its checkpoints of ``step`` and later are not what it goes on from."""
        self.saver.wait()
        if self.copies is not None:  # they hold the weights that led here
            self.copies.clear()

        def fail() -> NoReturn:
            raise NonFiniteError(
                f"{why}. Try a lower optimizer.learning_rate, a longer schedule.warmup or precision=float32, and "
                f"{set_aside(self.saver.folder, step)}"
            )

        self.ranks.main(fail)
        raise AssertionError("the first rank raises")

    def _find_cause(self, pending: _InFlight) -> str:
        """Compute the step again, from the same weights and states, and return what was not finite."""
        if bool(pending.parts[0].weight.isnan()):
            raise ValueError(NO_TARGETS)
        if self.carried is not None and pending.states is not None:
            self.carried.before = pending.states
        given = pending.parts, self.run.precision, self.ranks, self.carried
        return find_nonfinite(self.model, lambda: compute_gradients(self.model, *given), self.ranks)

    def _report(self, result: StepResult, pending: _InFlight, cause: str | None) -> None:
        step = self.position.step
        speed = (self.run.tokens_before(step) - self.run.tokens_before(step - 1)) / pending.seconds
        values = {
            "loss": result.loss, "grad_norm": result.grad_norm, "learning_rate": pending.rate,
            "tokens_per_second": speed, "mfu": speed * self._mfu_per_speed, "memory_gib": memory_gib(self.device),
            "data_seconds": pending.waited, "seconds": self.position.seconds, "skips": self.position.skipped,
        }  # fmt: skip
        if self.metrics is not None:
            self.metrics.write("train", step, values if cause is None else {**values, "skipped": cause})
        (task,) = self.display.task_ids
        loss, tokens = f"{result.loss:.4f}", f"{speed:,.0f}"
        self.display.update(task, completed=step, total=self.run.steps, loss=loss, speed=tokens)
        if cause is not None:
            self._say(f"step {step} skipped: {cause}")

    def _say(self, message: str) -> None:
        self.display.console.print(message)

    def _evaluate(self) -> None:
        begin = self.clock.now()
        result = evaluate(self.model, self.held_out, self.run.precision, self.ranks, self.beat)
        seconds = self.clock.now() - begin
        self.clock.took("evaluation", seconds)
        self.position = replace(self.position, seconds=self.position.seconds + seconds)
        self._finite_held_out = math.isfinite(result.loss)
        if self.metrics is not None:
            self.metrics.write("validation", self.position.step, asdict(result))
        end = "" if self.run.steps is None else f" of {self.run.steps}"
        self._say(f"step {self.position.step}{end}: held-out loss {result.loss:.4f} nats per token{result.note}")

    def _save(self) -> None:
        self.beat()
        begin = self.clock.now()
        self.ranks.run_or_abort_all((lambda: None) if self.metrics is None else self.metrics.flush)
        # No run can go on from such a checkpoint, and it would displace one that is good.
        if bad := first_nonfinite(training_tensors(self.model, self.optimizer), self.ranks):
            step = self.position.step
            self._give_up(f"after step {step} {bad}, and no checkpoint is written", step)
        self.saver.save(self.model, self.optimizer, self.position)
        self.clock.took("checkpoint", self.clock.now() - begin)
        self._saved, self._overdue, self._unproven = self.position.step, False, True


def training_bar(console: Console, step: int, steps: int | None) -> Progress:
    """Return a bar with one task: steps, loss (nats per token), tokens/s, elapsed and remaining time."""
    bar = Progress(
        TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False), console=console,
    )  # fmt: skip
    bar.add_task("training", total=steps, completed=step, loss="-", speed="-")
    return bar
