"""What finished runs say, alone and together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gecko.compare.folder import evaluation_of
from gecko.compare.plan import Planned
from gecko.eval.intervals import Interval, over_rows, over_seeds, standard_error
from gecko.train.evaluate import Evaluation
from gecko.train.metrics import METRICS, Record, read_metrics, seconds_by_step


@dataclass(frozen=True)
class Point:
    """A held-out loss on the way."""

    step: int
    tokens: int
    seconds: float
    """Spent in training steps until then."""
    nats_per_byte: float | None
    """None where it was not finite."""


@dataclass(frozen=True)
class RunResult:
    """Of one finished run."""

    recipe: str
    seed: int
    folder: str
    parameters: int
    learning_rate: float
    steps: int
    tokens: int
    """Trained on, those of skipped steps too."""
    skipped_steps: int
    evaluation: Evaluation
    """Of the finished model."""
    seconds: float
    """Spent in training steps: without evaluations and checkpoints."""
    tokens_per_second: float
    """Median over the steps."""
    curve: list[Point]

    @classmethod
    def of(cls, planned: Planned, parameters: int) -> RunResult | None:
        """None where the run is not finished."""
        run, evaluation = planned.run, evaluation_of(planned.run)
        if evaluation is None:
            return None
        records = read_metrics(run.folder / METRICS)
        steps = [record for record in records if record["kind"] == "train"]
        if len(steps) != run.steps:
            raise ValueError(
                f"{run.folder}/metrics.jsonl must have one line for each of {run.steps} steps; it has {len(steps)}. "
                "Restore it, or delete the run's folder: the same command trains it again."
            )
        seconds = seconds_by_step(steps, run.tokens_per_step)
        speed = statistics.median(record["tokens_per_second"] for record in steps)
        return cls(
            planned.recipe, run.seed, planned.name, parameters, run.optimizer.learning_rate, len(steps),
            len(steps) * run.tokens_per_step, sum("skipped" in record for record in steps), evaluation,
            seconds[len(steps)], speed, _curve(records, run.tokens_per_step, seconds),
        )  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Of a recipe's finished runs; losses in held-out nats a byte."""

    recipe: str
    parameters: int
    learning_rate: float
    seeds: list[int]
    nats_per_byte: float
    """Mean over seeds."""
    standard_error: float | None
    """Over seeds; None of one."""
    interval: Interval | None
    """Over seeds, or of one seed over held-out rows; ``method`` says which."""
    difference: float | None
    """To the first recipe, mean over the seeds that both have; None of the first itself, or without such seeds."""
    difference_seeds: list[int]
    difference_interval: Interval | None
    seconds: float
    """Mean over seeds, spent in training steps."""
    tokens_per_second: float
    """Mean over seeds."""


def summarise(results: Sequence[RunResult], first: str) -> list[Summary]:
    """One for each recipe that has results, in their order; ``first`` is what the others are compared with."""
    by_recipe: dict[str, list[RunResult]] = {}
    for result in results:
        by_recipe.setdefault(result.recipe, []).append(result)
    return [_summary(of, by_recipe.get(first, []) if recipe != first else []) for recipe, of in by_recipe.items()]


def _summary(results: Sequence[RunResult], first: Sequence[RunResult]) -> Summary:
    losses = [result.evaluation.nats_per_byte for result in results]
    interval = over_seeds(losses) if len(results) > 1 else _over_rows(results[0].evaluation)
    pairs = [(mine, other) for mine in results for other in first if mine.seed == other.seed]
    differences = [mine.evaluation.nats_per_byte - other.evaluation.nats_per_byte for mine, other in pairs]
    difference_interval = over_seeds(differences)
    if len(pairs) == 1:
        difference_interval = _over_rows(pairs[0][0].evaluation, pairs[0][1].evaluation)
    return Summary(
        results[0].recipe, results[0].parameters, results[0].learning_rate, [result.seed for result in results],
        statistics.fmean(losses), standard_error(losses), interval,
        statistics.fmean(differences) if differences else None,
        [mine.seed for mine, _ in pairs], difference_interval,
        statistics.fmean(result.seconds for result in results),
        statistics.fmean(result.tokens_per_second for result in results),
    )  # fmt: skip


def _over_rows(evaluation: Evaluation, other: Evaluation | None = None) -> Interval | None:
    """Of the loss in nats a byte, or of its difference to ``other``'s, row by row; None where rows were not kept."""
    if not evaluation.row_losses or (other is not None and not other.row_losses):
        return None
    losses = np.array(evaluation.row_losses)
    if other is not None:
        if other.row_targets != evaluation.row_targets:
            raise ValueError("models are compared on the same held-out rows; these two were tested on different ones.")
        losses = losses - np.array(other.row_losses)
    return over_rows(losses, evaluation.row_targets, evaluation.nats_per_byte / evaluation.loss)


def _curve(records: Sequence[Record], tokens_per_step: int, seconds: Mapping[int, float]) -> list[Point]:
    return [
        Point(record["step"], record["step"] * tokens_per_step, seconds[record["step"]], record["nats_per_byte"])
        for record in records
        if record["kind"] == "validation"
    ]
