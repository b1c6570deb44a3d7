"""How many steps fit into a time: measured once when a run starts, so that the schedule depends on steps alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from gecko.baselines import LanguageModel
from gecko.parallel.mesh import Ranks
from gecko.train.batches import Batches
from gecko.train.evaluate import HeldOut, evaluate
from gecko.train.optimizer import build_optimizer
from gecko.train.run import Run
from gecko.train.step import split_batch, train_step

WARMUP_STEPS = 4
"""Not timed: a process's first steps are several times slower than the rest."""
TIMED_STEPS = 8


def steps_in_budget(run: Run, model: LanguageModel, batches: Batches, held_out: HeldOut, ranks: Ranks) -> int:
    """The steps that fit into ``run.minutes`` with their evaluations, the measuring itself included; at least 1.

    All ranks measure together, and the first rank's clock counts.
    The steps measured have a learning rate of 0 and an optimizer of their own: the model does not change.
    """
    if run.minutes is None:
        raise ValueError("minutes must be set to measure how many steps fit into them; got None.")
    begin = time.perf_counter()
    device = next(model.parameters()).device
    optimizer = build_optimizer(model, run.optimizer)

    def one_step(step: int) -> None:
        parts = split_batch(batches.batch(step), run.accumulation, device, ranks)
        clip, precision = run.optimizer.clip, run.precision
        train_step(model, optimizer, parts, learning_rate=0.0, clip=clip, precision=precision, ranks=ranks)

    seconds = [_timed(lambda step=step: one_step(step)) for step in range(WARMUP_STEPS + TIMED_STEPS)]  # type: ignore[misc]
    evaluation = _timed(lambda: evaluate(model, held_out, run.precision, ranks))
    model.zero_grad(set_to_none=True)
    per_step = statistics.median(seconds[WARMUP_STEPS:]) + evaluation / run.evaluation.every
    left = run.minutes * 60 - (time.perf_counter() - begin) - 2 * evaluation
    return ranks.share(max(1, int(left / per_step)))


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
