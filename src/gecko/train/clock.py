"""The time of a run with ``minutes``: what its parts take, and when its learning rate has to begin to fall."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gecko.train.run import Run


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


class Clock:
    """Time of a run and of its parts.

    Args:
        now: returns the time in seconds.
        begin: when the command began; for a run that is resumed, earlier by the time of the sessions before.
        minutes: time of the run.
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

        It is called after each step. Steps are expected to take the mean time of those of this session, or of its last
        ones, as many as the decay has, if that is longer; and the end as much longer as the evaluations do.
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
