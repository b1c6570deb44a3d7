"""Results of runs, their summary by recipe, and ``comparison.json``, which holds all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gecko.eval.results import Interval, over_rows, over_seeds, standard_error
from gecko.experiments.compare.plan import Plan, Planned, common_settings, evaluation_of
from gecko.experiments.compare.runs import Trial
from gecko.io.files import Record, parse_json, whole_file
from gecko.pages import is_page
from gecko.runtime.process import code_version
from gecko.train.evaluate import Evaluation
from gecko.train.metrics import METRICS, read_metrics, seconds_by_step
from gecko.train.run import Run


@dataclass(frozen=True)
class Point:
    """Held-out loss at a step of training."""

    step: int
    tokens: int
    seconds: float
    """Seconds in training steps until then."""
    nats_per_byte: float | None
    """None if the loss was not finite."""


@dataclass(frozen=True)
class RunResult:
    """Result of one finished run."""

    recipe: str
    seed: int
    folder: str
    parameters: int
    learning_rate: float
    steps: int
    tokens: int
    """Tokens trained on, including those of skipped steps."""
    skipped_steps: int
    evaluation: Evaluation
    """Evaluation of the finished model."""
    seconds: float
    """Seconds in training steps, without evaluations and checkpoints."""
    tokens_per_second: float
    """Median over the steps."""
    curve: list[Point]

    @classmethod
    def of(cls, planned: Planned, parameters: int) -> RunResult | None:
        """Return the result of a planned run; None if it is not finished."""
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
        seconds = seconds_by_step(steps, run.tokens_before)
        speed = statistics.median(record["tokens_per_second"] for record in steps)
        return cls(
            planned.recipe, run.seed, planned.name, parameters, run.optimizer.learning_rate, len(steps),
            run.tokens_before(len(steps)), sum("skipped" in record for record in steps), evaluation,
            seconds[len(steps)], speed, _curve(records, run, seconds),
        )  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Summary of a recipe's finished runs; losses are held-out nats per byte."""

    recipe: str
    parameters: int
    learning_rate: float
    seeds: list[int]
    nats_per_byte: float
    """Mean over seeds."""
    standard_error: float | None
    """Standard error over seeds; None for one seed."""
    interval: Interval | None
    """Interval over seeds, or for one seed over held-out rows; see its ``method``."""
    difference: float | None
    """Mean difference to the first recipe over common seeds; None for the first recipe, or without common seeds."""
    difference_seeds: list[int]
    difference_interval: Interval | None
    seconds: float
    """Mean over seeds of the seconds in training steps."""
    tokens_per_second: float
    """Mean over seeds."""


def summarise(results: Sequence[RunResult], first: str) -> list[Summary]:
    """Return one summary per recipe with results. The others are compared with the recipe ``first``."""
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
    """Return the interval of the loss in nats per byte, or of its difference to ``other``, paired by row.

    None if losses by row are not recorded.
    """
    if not evaluation.row_losses or (other is not None and not other.row_losses):
        return None
    losses = np.array(evaluation.row_losses)
    if other is not None:
        if other.row_targets != evaluation.row_targets:
            raise ValueError("models are compared on the same held-out rows; these two were tested on different ones.")
        losses = losses - np.array(other.row_losses)
    return over_rows(losses, evaluation.row_targets, evaluation.nats_per_byte / evaluation.loss)


def _curve(records: Sequence[Record], run: Run, seconds: Mapping[int, float]) -> list[Point]:
    return [
        Point(record["step"], run.tokens_before(record["step"]), seconds[record["step"]], record["nats_per_byte"])
        for record in records
        if record["kind"] == "validation"
    ]


FORMAT, NAME, PAGE = "gecko-comparison-1", "comparison.json", "comparison.html"
PICTURES = ("loss-by-tokens", "loss-by-time")


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison has found so far."""

    plan: Plan
    command: str
    hardware: Mapping[str, str]
    trials: Sequence[Trial]
    """Tuning runs; empty without tuning."""
    rates: Mapping[str, float]
    """Chosen learning rates by recipe."""
    runs: Sequence[RunResult]
    summaries: Sequence[Summary]
    unfinished: Mapping[str, str]
    """States of unfinished runs by label."""
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        plan, first = self.plan, next(iter(self.plan.recipes))
        return {
            "format": FORMAT, **code_version(), "command": self.command, "hardware": dict(self.hardware),
            "unit": "held-out nats a byte", "first": first, "seeds": list(plan.seeds),
            "settings": common_settings(plan.recipes[first]), "parameters": dict(plan.parameters),
            "models": {name: run.to_dict()["model"] for name, run in plan.recipes.items()},
            "tuning": None if plan.tuning is None else asdict(plan.tuning) | {
                "trials": [asdict(trial) for trial in self.trials], "chosen": dict(self.rates),
            },
            "recipes": [asdict(summary) for summary in self.summaries],
            "runs": [_run(run) for run in self.runs],
            "unfinished": dict(self.unfinished), "notes": list(self.notes),
        }  # fmt: skip

    def save(self) -> Path:
        """Write ``comparison.json`` atomically and return its path."""
        path = self.plan.folder / NAME
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return path


def check_folder(folder: Path) -> None:
    """Check that a comparison may be written to the folder.

    Raises:
        ValueError: the folder is a training run's, or holds files of the comparison's names that are not a
            comparison's.
    """
    if (folder / "checkpoints").exists() or (folder / METRICS).exists():
        raise ValueError(f"--out must be a folder for a comparison; {folder} is that of a run. Choose another one.")
    _check_page(folder)
    path = folder / NAME
    try:
        found = parse_json(path.read_text(encoding="utf-8")).get("format")
    except FileNotFoundError:
        return
    except (ValueError, AttributeError):
        found = None
    if found != FORMAT:
        raise ValueError(
            f"{path} must have been written by gecko compare ({FORMAT}); it was not, or it is damaged. Move it away: "
            "it is made again from the runs beside it."
        )


def _check_page(folder: Path) -> None:
    """Check that the page and the pictures beside it, if they exist, were written by a comparison."""
    page = folder / PAGE
    ours = page.is_file() and is_page(page)
    for path in (page, *(folder / f"{picture}.png" for picture in PICTURES)):
        if path.exists() and not ours:
            raise ValueError(
                f"{path} must have been written by gecko compare, which replaces it; it was not. Move it away, or "
                "choose another --out."
            )


def _run(run: RunResult) -> dict[str, Any]:
    values, evaluation = asdict(run), run.evaluation
    del values["evaluation"]
    return values | {
        "folder": f"{run.recipe}/{run.folder}",
        "nats_per_byte": evaluation.nats_per_byte,
        "nats_per_token": evaluation.loss,
        "held_out_tokens": evaluation.tokens,
    }
