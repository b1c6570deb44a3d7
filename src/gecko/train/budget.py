"""The time of a run with ``minutes``: what its parts take, which is measured before the first step, and when its
learning rate has to begin to fall."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from gecko.data import IGNORED, Batch
from gecko.models import LanguageModel
from gecko.ops.backends import cpu as native
from gecko.parallel.mesh import Ranks
from gecko.train.capture import CapturedGradients
from gecko.train.data import Prefetcher, RunData
from gecko.train.evaluate import evaluate, sample_text
from gecko.train.optimizer import build_optimizer
from gecko.train.run import Run
from gecko.train.step import Step, split_batch


@dataclass(frozen=True)
class Costs:
    """Seconds that each part of a run takes."""

    step: float
    evaluation: float
    """Seconds of one evaluation of ``evaluation.rows``."""
    checkpoint: float
    end: float
    """Seconds after the last step: the final held-out loss, the sample and the report."""

    def seconds(self, run: Run, steps: int, done: int = 0) -> float:
        """Return the seconds from step ``done`` to the end of a run of ``steps`` steps, which begins and ends with an
        evaluation."""
        evaluations = (done == 0) - (-steps // run.evaluation.every) - done // run.evaluation.every
        checkpoints = -(-steps // run.checkpoint.every) - done // run.checkpoint.every
        parts = evaluations * self.evaluation + checkpoints * self.checkpoint
        return (steps - done) * self.step + parts + self.end


class RunClock:
    """Time of a run and of its parts, by ``now()`` in seconds, since ``begin``.

    That is when the command began; for a run that is resumed, earlier by the time of the sessions before.
    """

    def __init__(self, now: Callable[[], float], begin: float, minutes: float | None = None) -> None:
        self.now, self.begin, self._minutes = now, begin, math.inf if minutes is None else minutes
        self.costs = self._measured = Costs(0.0, 0.0, 0.0, 0.0)
        self._apart, self._ends = 0.0, list[float]()
        """Seconds of evaluations and checkpoints, and the time without these after each step of this session."""

    @property
    def elapsed(self) -> float:
        return self.now() - self.begin

    @property
    def left(self) -> float:
        return self._minutes * 60 - self.elapsed

    def expect(self, costs: Costs) -> None:
        """Use the costs that were measured before the first step for the parts that were not run yet."""
        self.costs = self._measured = costs

    def took(self, part: str, seconds: float) -> None:
        """Record the time of an evaluation or a checkpoint; one that was slow does not count fully."""
        self._apart += seconds
        self.costs = replace(self.costs, **{part: (getattr(self.costs, part) + seconds) / 2})

    def has_to_decay(self, run: Run, done: int) -> bool:
        """Return whether the time left is too short for one step more after ``done`` before the decay and the end.

        Call it after each step. Steps are expected to take the mean time of those of this session, or of its last ones,
        as many as the decay has, if that is longer; and the end as much longer as the evaluations do.
        """
        elapsed, decay, costs = self.elapsed, run.schedule.decay_after(done + 1), self.costs
        self._ends.append(elapsed - self._apart)
        count = len(self._ends) - 1
        if count:
            recent = min(count, decay)
            means = [(self._ends[-1] - self._ends[-1 - steps]) / steps for steps in (count, recent)]
            slower = costs.evaluation / max(self._measured.evaluation, 1e-9)
            costs = replace(costs, step=max(means), end=costs.end * max(1.0, slower))
        return elapsed + costs.seconds(run, done + 1 + decay, done) > self._minutes * 60


WARMUP_STEPS = 4
"""Steps that are not timed, because the first steps of a process are several times slower than the rest."""
TIMED_STEPS, _SAMPLED = 8, 8
"""Steps, and tokens of the sample, that are timed."""
MEASURING_PART = 0.1
"""Maximum fraction of the time budget spent on measuring; at least one step is measured."""
EVALUATING_PART = 0.1
"""Maximum fraction of the time budget for the final held-out loss, for those before it together, and for the sample."""
WRITE_BYTES_PER_SECOND = 200e6
"""Assumed speed of saving a checkpoint: write, flush to disk and read for the checksums."""
REPORT_SECONDS = 6.0
"""Assumed time to draw the report and to end the process."""
SLACK_SECONDS, SLACK_PART = 20.0, 0.1
"""A run of one step may end this many seconds, or this fraction of the budget, after the budget."""


def measured(
    run: Run, model: LanguageModel, batches: Prefetcher, data: RunData, ranks: Ranks, clock: RunClock, *, fresh: bool
) -> Run:
    """Measure what the run does for the clock, and return it with what it has to fix before its first step.

    If the run follows the clock, these are the steps of its warm-up; else the steps, at least 1, for which the whole
    command takes at most ``run.minutes``. The final evaluation, the others together, and the sample get fewer rows or
    tokens if they took more than ``EVALUATING_PART`` of them each. A run that is not ``fresh`` fixed this before. All
    ranks measure together, and use the first rank's times. The model does not change.
    """
    console = ranks.console
    console.print(f"measuring how many steps fit into {run.minutes:g} minutes")
    assert run.minutes is not None
    if next(model.parameters()).device.type == "cpu":  # else GCC would build the kernels in a call that is timed
        native.library("operators"), native.library("decoding")
    at_once = data.held_out.batch_size * ranks.data_ranks
    rows, sampled = data.held_out.spread(at_once), min(_SAMPLED, run.sample.tokens)
    with console.status("measuring"):
        step = _step_seconds(run, model, batches, ranks, clock, MEASURING_PART * clock.left)
        batch = _warm(lambda: evaluate(model, rows, run.precision, ranks), clock)
        token = 0.0
        if sampled and ranks.world == 1:  # several ranks cannot generate from a sharded model
            short = replace(run, sample=replace(run.sample, tokens=sampled))
            token = _warm(lambda: sample_text(short, model, data.tokenizer, data.prompt), clock) / sampled
    step, batch, token, left = ranks.broadcast((step, batch, token, clock.left))
    most = EVALUATING_PART * run.minutes * 60

    def bounded(count: int, seconds: float, at_once: int) -> int:
        """Return how many of ``count`` rows or tokens take ``most`` seconds, at least those of one batch."""
        return min(count, max(1, int(most / seconds)) * at_once)

    wanted = len(data.final.rows.tokens), len(data.held_out.rows.tokens), run.sample.tokens
    final = bounded(wanted[0], batch, at_once)
    curve = bounded(wanted[1], batch * (2 + left / step / run.evaluation.every), at_once)
    tokens = bounded(wanted[2], max(token, 1e-9), 1)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    saving, end = 3 * size / WRITE_BYTES_PER_SECOND, -(-final // at_once) * batch + tokens * token + REPORT_SECONDS
    clock.expect(Costs(step, -(-curve // at_once) * batch, saving, end))
    if not fresh:
        return run
    names = "evaluation.final_rows", "evaluation.rows", "sample.tokens"
    few = zip(names, wanted, (final, curve, tokens), strict=True)
    fixed = [f"{name}={given}" for name, all_of_them, given in few if given < all_of_them]
    for line in fixed:
        console.print(f"{line}: more would take more than {EVALUATING_PART:.0%} of the time")
    return run.with_settings(*fixed, *_planned(run, clock.costs, left, console))


def _planned(run: Run, costs: Costs, left: float, console: Console) -> list[str]:
    """Return the settings that follow from the number of steps that fit into ``left`` seconds.

    Raise ValueError if a run of one step ends much later than ``run.minutes``.
    """
    assert run.minutes is not None
    needed = costs.seconds(run, 1)
    short = (
        f"minutes={run.minutes:g} is too short for this run: a single step with its held-out losses, checkpoint, "
        "sample and report takes about"
    )
    if needed - left > max(SLACK_SECONDS, SLACK_PART * run.minutes * 60):
        enough = math.ceil(2 * (needed + run.minutes * 60 - left) / 60)
        raise ValueError(
            f"{short} {needed / 60:.1f} minutes, after {run.minutes - left / 60:.1f} in which kernels were built, "
            f"texts read and times measured. Nothing was trained. Try minutes={enough}, or fewer evaluation.rows, "
            "evaluation.final_rows, sample.tokens and rows in a batch."
        )
    steps = most_steps(run, costs, left)
    minutes = costs.seconds(run, steps) / 60
    if minutes * 60 > left:
        console.print(f"{short} {minutes:.1f} more minutes. It is trained for that one")
    elif run.follows_clock:
        console.print(f"about {steps} steps fit; their number is fixed when the learning rate has to fall")
    else:
        console.print(f"{steps} steps fit; the run ends in about {minutes:.1f} minutes")
    if not run.follows_clock:
        return [f"steps={steps}"]
    warmup = run.schedule.warmup_steps
    warmup = round(run.schedule.warmup * steps) if warmup is None else warmup
    return ["schedule.kind=wsd", f"schedule.warmup_steps={warmup}"]


def _step_seconds(
    run: Run, model: LanguageModel, batches: Prefetcher, ranks: Ranks, clock: RunClock, limit: float
) -> float:
    """Return the median time of a step after warm-up; the shortest time if ``limit`` seconds pass during warm-up.

    If a step takes longer than ``limit``, estimate it from one row: measuring it would use up the time for training.
    """
    device, full = next(model.parameters()).device, run.schedule.first_full_step
    captured = CapturedGradients(model, run.precision, ranks) if run.capture else None
    optimizer = build_optimizer(model, run.optimizer)  # with a learning rate of 0
    step = Step(model, optimizer, run.optimizer.clip, run.precision, ranks=ranks, captured=captured)

    def one_step(batch: Batch, parts: int = run.gradient_accumulation_steps) -> None:
        step.start(split_batch(batch, parts, device, ranks), learning_rate=0.0).wait()

    seconds: list[float] = []
    if not run.compile:  # a compiler would compile the model for batches of one row too
        first = batches.batch(full)
        fullest = int((first.targets != IGNORED).sum(1).argmax())
        row = Batch(*(x[fullest : fullest + 1] for x in (first.tokens, first.targets, first.segment_ids)))
        estimate = len(first.tokens) * _warm(lambda: one_step(row, 1), clock)
        if ranks.broadcast(estimate > limit):
            seconds.append(estimate)
    if not seconds:
        while len(seconds) < WARMUP_STEPS + TIMED_STEPS and (not seconds or ranks.broadcast(sum(seconds) < limit)):
            seconds.append(_timed(lambda: one_step(batches.batch(full + len(seconds))), clock))
    model.zero_grad(set_to_none=True)
    return statistics.median(seconds[WARMUP_STEPS:]) if len(seconds) > WARMUP_STEPS else min(seconds)


def most_steps(run: Run, costs: Costs, left: float) -> int:
    """Return the largest number of steps of a run that takes at most ``left`` seconds; at least 1."""
    numbers = range(1, max(2, int(left / costs.step) + 2))
    return max(1, bisect_right(numbers, left, key=lambda steps: costs.seconds(run, steps)))


def _warm(work: Callable[[], object], clock: RunClock) -> float:
    """Return the time of the faster of two calls: in the first, kernels are built and memory is allocated."""
    return min(_timed(work, clock) for _ in range(2))


def _timed(work: Callable[[], object], clock: RunClock) -> float:
    begin = clock.now()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock.now() - begin
