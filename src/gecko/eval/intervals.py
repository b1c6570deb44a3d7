"""How sure a number is: 95 % intervals, each named by its method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from gecko.extras import require

Values = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
_RESAMPLES_AT_ONCE = 100
_ROWS_SEED = 0


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    method: str

    def map(self, function: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the value."""
        return Interval(function(self.low), function(self.high), self.method)


def wilson(successes: int, trials: int) -> Interval:
    """Of a share of ``trials`` ≥ 1 independent ones."""
    statistics = require("scipy.stats", "eval")
    found = statistics.binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(float(found.low), float(found.high), "Wilson, 95 %")


def bootstrap(
    samples: Sequence[Values], statistic: Callable[..., Values], unit: str, seed: int
) -> Interval | None:  # fmt: skip
    """Percentiles over resamples of units drawn with replacement.

    Args:
        samples: arrays of one value for each unit, all (n,); a unit's values stay together.
        statistic: of resampled ``samples``, (…, n) each with ``axis`` −1 the units, (…).
        unit: what is drawn, in the plural.

    Returns:
        None for fewer than two units: they say nothing of how much units differ.
    """
    if len(samples[0]) < 2:
        return None
    statistics = require("scipy.stats", "eval")
    found = statistics.bootstrap(
        tuple(samples), statistic, n_resamples=RESAMPLES, batch=_RESAMPLES_AT_ONCE, vectorized=True, paired=True,
        confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(float(found.low), float(found.high), f"bootstrap over {len(samples[0]):,} {unit}, 95 %")


def bootstrap_mean(values: Values, unit: str, seed: int) -> Interval | None:
    """Of the mean of (n,) values."""
    return bootstrap([values], lambda x, axis=-1: x.mean(axis=axis), unit, seed)


def bootstrap_ratio(sums: Values, counts: Values, unit: str, seed: int) -> Interval | None:
    """Of Σ ``sums`` / Σ ``counts``, (n,) both."""
    return bootstrap([sums, counts], lambda x, n, axis=-1: x.sum(axis=axis) / n.sum(axis=axis), unit, seed)


def student(mean: float, error: float | None, n: int, unit: str) -> Interval | None:
    """Of a mean over ``n`` units with the standard error ``error``; None where that is."""
    if error is None:
        return None
    reach = float(require("scipy.stats", "eval").t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    return Interval(float(mean - reach), float(mean + reach), f"Student's t over {unit}, 95 %")


def standard_error(values: Sequence[float]) -> float | None:
    """Of their mean; None for fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def over_seeds(values: Sequence[float]) -> Interval | None:
    """Of the mean of one value for each seed; None for fewer than two."""
    if len(values) < 2:
        return None
    return student(fmean(values), standard_error(values), len(values), f"{len(values)} seeds")


def over_rows(losses: Sequence[float] | Values, targets: Sequence[int], scale: float) -> Interval | None:
    """Of ``scale`` · Σ ``losses`` / Σ ``targets`` of held-out rows; None where fewer than two were kept."""
    return bootstrap_ratio(scale * np.array(losses), np.array(targets, float), "held-out rows", _ROWS_SEED)


def share(hits: Sequence[bool]) -> tuple[float, Interval]:
    """The share of hits, of at least one trial, and its interval."""
    return sum(hits) / len(hits), wilson(sum(hits), len(hits))
