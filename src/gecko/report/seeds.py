"""One number of a model from the numbers of its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gecko.eval.intervals import Interval, over_seeds

NOT_AVERAGED = ("t", "p, two-sided")
"""Scores that say something of one sample only: each seed's is shown."""


@dataclass(frozen=True)
class Estimate:
    """``values`` of all seeds, their mean, its interval, and of how much each value is."""

    values: tuple[float, ...]
    mean: float
    interval: Interval | None
    n: str


def estimate(scores: Sequence[Mapping[str, Any]], limits: tuple[float, float] | None = None) -> Estimate:
    """Of the same score, as result files hold it, of each seed.

    The interval of one seed is the evaluation's own; that of several is of the mean over seeds. Where all seeds gave
    the same number they say nothing of their spread, and the interval spans the evaluations' own.

    Args:
        limits: the values of 0 and 100 %, for scores that are shares.
    """
    values = tuple(float(score["value"]) for score in scores)
    own = [Interval(**score["interval"]) for score in scores if score["interval"] is not None]
    interval = (own[0] if own else None) if len(values) == 1 else _over_seeds(values, own, limits)
    return Estimate(values, statistics.fmean(values), interval, _count(scores))


def error_bars(estimates: Iterable[Estimate]) -> list[list[float]]:
    """How far intervals reach below and above the means; not at all where there is none."""
    below, above = [], []
    for found in estimates:
        low, high = (found.mean, found.mean) if found.interval is None else (found.interval.low, found.interval.high)
        below.append(max(0.0, found.mean - low))
        above.append(max(0.0, high - found.mean))
    return [below, above]


def _over_seeds(
    values: Sequence[float], own: Sequence[Interval], limits: tuple[float, float] | None
) -> Interval | None:  # fmt: skip
    if len(set(values)) > 1:
        return _cut(over_seeds(values), limits)
    if not own:
        return None
    return Interval(min(one.low for one in own), max(one.high for one in own),
                    f"equal for all seeds: widest of each seed's ({own[0].method})")  # fmt: skip


def _cut(interval: Interval | None, limits: tuple[float, float] | None) -> Interval | None:
    """Student's interval is symmetric, and near 0 and 100 % reaches beyond what a share can be."""
    if interval is None or limits is None:
        return interval
    low, high = max(limits[0], interval.low), min(limits[1], interval.high)
    return Interval(low, high, f"{interval.method}, cut at 0 and 100 %")


def _count(scores: Sequence[Mapping[str, Any]]) -> str:
    counts = sorted({int(score["n"]) for score in scores})
    number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{number} {scores[0]['unit']}"
