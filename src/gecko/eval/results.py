"""Results of evaluations: scores with sample sizes and 95 % intervals, and the settings that reproduce them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from gecko.io.files import write_text
from gecko.records import unknown_name
from gecko.runtime.process import code_version, require

Values = NDArray[np.float64]
Report = Callable[[str], None]
"""Function that an evaluation calls with a description of its progress."""
FORMAT = "gecko-evaluation-1"
CONFIDENCE = 0.95
RESAMPLES = 2000
_RESAMPLES_AT_ONCE = 100
_ROWS_SEED = 0


def quiet(place: str) -> None:
    """Ignore the progress."""


def check_task(task: str, tasks: Collection[str]) -> None:
    """Raise ValueError that names the nearest one if a task is none of ``tasks``."""
    if task not in tasks:
        raise ValueError(unknown_name("task", task, tasks))


@dataclass(frozen=True)
class Interval:
    """95 % confidence interval with the name of its method."""

    low: float
    high: float
    method: str

    def map(self, function: Callable[[float], float]) -> Interval:
        """Return the interval of an increasing function of the value."""
        return Interval(function(self.low), function(self.high), self.method)


def methods(intervals: Iterable[Interval | None]) -> str:
    """Return the names of the intervals' methods, each once."""
    return "; ".join(dict.fromkeys(one.method for one in intervals if one is not None))


def wilson(successes: int, trials: int) -> Interval:
    """Return the Wilson interval of a proportion of ``trials`` ≥ 1 independent trials."""
    found = require("scipy.stats", "eval").binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(float(found.low), float(found.high), "Wilson, 95 %")


def bootstrap(samples: Sequence[Values], statistic: Callable[..., Values], unit: str, seed: int) -> Interval | None:
    """Return the percentile bootstrap interval over resamples of units; None for fewer than two.

    Args:
        samples: arrays of one value per unit, all (n,). The values of a unit are drawn together.
        statistic: function of the resampled ``samples``, each (…, n) with the units along ``axis`` −1; returns (…).
        unit: name of the units, in the plural.
    """
    if len(samples[0]) < 2:
        return None
    found = require("scipy.stats", "eval").bootstrap(
        tuple(samples), statistic, n_resamples=RESAMPLES, batch=_RESAMPLES_AT_ONCE, vectorized=True, paired=True,
        confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(float(found.low), float(found.high), f"bootstrap over {len(samples[0]):,} {unit}, 95 %")


def bootstrap_mean(values: Values, unit: str, seed: int) -> Interval | None:
    """Return the bootstrap interval of the mean of (n,) values."""
    return bootstrap([values], lambda x, axis=-1: x.mean(axis=axis), unit, seed)


def _bootstrap_ratio(sums: Values, counts: Values, unit: str) -> Interval | None:
    """Return the bootstrap interval of Σ ``sums`` / Σ ``counts``, both (n,)."""
    return bootstrap([sums, counts], lambda x, n, axis=-1: x.sum(axis=axis) / n.sum(axis=axis), unit, _ROWS_SEED)


def over_rows(losses: Sequence[float] | Values, targets: Sequence[int], scale: float) -> Interval | None:
    """Return the bootstrap interval of ``scale`` · Σ ``losses`` / Σ ``targets``; None for fewer than two rows."""
    return _bootstrap_ratio(scale * np.array(losses), np.array(targets, float), "held-out rows")


def student(mean: float, error: float | None, n: int, unit: str) -> Interval | None:
    """Return Student's t interval of a mean over ``n`` units with standard error ``error``; None if that is None."""
    if error is None:
        return None
    reach = float(require("scipy.stats", "eval").t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    return Interval(float(mean - reach), float(mean + reach), f"Student's t over {unit}, 95 %")


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None for fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def over_seeds(values: Sequence[float]) -> Interval | None:
    """Return Student's t interval of the mean over seeds; None for fewer than two."""
    return student(fmean(values), standard_error(values), len(values), f"{len(values)} seeds") if values else None


def share(hits: Sequence[bool]) -> tuple[float, Interval]:
    """Return the proportion of hits among at least one trial, and its interval."""
    return sum(hits) / len(hits), wilson(sum(hits), len(hits))


def share_by_row(rows: Sequence[Sequence[bool]]) -> tuple[float, Interval | None]:
    """Return the proportion of hits, and its interval over rows: the answers of one row depend on each other.

    Wilson's if every row has one answer; rows that are all right or all wrong count as one answer each. None for a
    single row of several answers.
    """
    hits, counts = np.array([sum(row) for row in rows], float), np.array([len(row) for row in rows], float)
    value = float(hits.sum() / counts.sum())
    if counts.max() == 1:
        return value, wilson(int(hits.sum()), len(rows))
    if value in (0, 1) and len(rows) > 1:
        return value, replace(wilson(int(value) * len(rows), len(rows)), method="rows alike: Wilson over rows, 95 %")
    found = _bootstrap_ratio(hits, counts, "rows")
    return value, found and replace(found, method="bootstrap over rows, 95 %")


@dataclass(frozen=True)
class Score:
    """A number measured in an evaluation.

    Raises:
        ValueError: the number is not finite, or its sample is empty.
    """

    name: str
    value: float
    n: int
    """Sample size, in units."""
    unit: str
    """Name of the units, in the plural."""
    interval: Interval | None
    """None if the sample is too small for one."""
    where: Mapping[str, str | int | float] = field(default_factory=dict)
    """Case of the evaluation, such as ``{"context": 1024}``."""

    def __post_init__(self) -> None:
        place = ", ".join(f"{key} {value}" for key, value in self.where.items())
        if self.n < 1:
            raise ValueError(f"a score must be of at least one of its {self.unit}; {self.name} ({place}) is of none.")
        if not math.isfinite(self.value):
            raise ValueError(
                f"a score must be finite; {self.name} ({place}) is {self.value}. The model's weights or activations "
                "hold such values, or 16-bit arithmetic overflows: try float32."
            )


@dataclass(frozen=True)
class Results:
    """Results of one evaluation of one model."""

    evaluation: str
    scores: list[Score]
    settings: Mapping[str, Any]
    seed: int
    notes: list[str] = field(default_factory=list)
    """Notes for the reader, such as what was left out and why."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Curves and answers as JSON values."""

    def save(self, path: Path, model: Mapping[str, Any], command: str, hardware: Mapping[str, str]) -> None:
        """Write the results as JSON, atomically."""
        record = {
            "format": FORMAT, **code_version(), "evaluation": self.evaluation, "model": dict(model),
            "command": command, "seed": self.seed, "hardware": dict(hardware), "settings": dict(self.settings),
            "scores": [asdict(score) for score in self.scores], "notes": self.notes, "details": dict(self.details),
        }  # fmt: skip
        write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")

    def table(self, title: str) -> Table:
        """Return a table with one row per score."""
        places = list(dict.fromkeys(key for score in self.scores for key in score.where))
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False)
        for name in (*places, "score"):
            table.add_column(name, overflow="fold")
        for name in ("value", "95 % interval", "n"):
            table.add_column(name, justify="right", no_wrap=True)
        for score in self.scores:
            cells, found = [score.where.get(name, "") for name in places], score.interval
            table.add_row(
                *(f"{cell:g}" if isinstance(cell, float) else readable(cell) for cell in cells), score.name,
                readable(score.value), "none" if found is None else f"{readable(found.low)} .. {readable(found.high)}",
                f"{score.n:,} {score.unit}",
            )  # fmt: skip
        return table

    def methods(self) -> str:
        """Return the names of the intervals' methods."""
        return methods(score.interval for score in self.scores)


def readable(value: str | int | float) -> str:
    """Format a value with a fitting number of digits."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3e}"
