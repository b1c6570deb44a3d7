"""Held-out loss against tokens and against time: every seed thin, their mean thick."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from gecko.compare.results import Point, RunResult
from gecko.pages.drawing import LineStyle, label_line_ends, new_figure

_SHOWN = 1 / 3
"""The scale fits the curves from this part of the tokens on: before, all fall steeply and side by side."""
_TOKENS = (("billions", 1e9), ("millions", 1e6), ("thousands", 1e3))
_SECONDS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def loss_by_tokens(runs: Sequence[RunResult]) -> Any:
    """A matplotlib figure over the tokens trained on."""
    unit, size = _unit(max(run.tokens for run in runs), _TOKENS)
    return _curves(runs, f"tokens trained on, {unit}", lambda point: point.tokens / size)


def loss_by_time(runs: Sequence[RunResult]) -> Any:
    """A matplotlib figure over the time spent in training steps."""
    unit, size = _unit(max(run.seconds for run in runs), _SECONDS)
    return _curves(runs, f"time in training steps, {unit}", lambda point: point.seconds / size)


def _curves(runs: Sequence[RunResult], xlabel: str, x: Callable[[Point], float]) -> Any:
    figure, axes = new_figure(xlabel, "held-out loss, nats a byte", height=4.0)
    ends = []
    for number, recipe in enumerate(dict.fromkeys(run.recipe for run in runs)):
        style = LineStyle.of(number)
        curves = [run.curve for run in runs if run.recipe == recipe]
        for curve in curves if len(curves) > 1 else []:
            axes.plot(*_columns(curve, x), color=style.color, linestyle=style.dashes, linewidth=0.6, alpha=0.6)
        mean = _mean(curves, x)
        axes.plot(*mean, **{**style.line(len(mean[0])), "linewidth": 2.0})
        ends.append((mean[1][-1], style, recipe))
    late = [point.nats_per_byte for run in runs for point in _late(run.curve) if point.nats_per_byte is not None]
    if late:
        margin = 0.05 * (max(late) - min(late)) or 0.01
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set_xlim(left=0)
    label_line_ends(axes, [end for end in ends if math.isfinite(end[0])])
    return figure


def _unit(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit, with its size, of which there are at least two."""
    return next((unit for unit in units if largest >= 2 * unit[1]), units[-1])


def _late(curve: Sequence[Point]) -> Sequence[Point]:
    return [point for point in curve if point.tokens >= _SHOWN * curve[-1].tokens]


def _columns(curve: Sequence[Point], x: Callable[[Point], float]) -> tuple[list[float], list[float]]:
    return [x(point) for point in curve], [_number(point.nats_per_byte) for point in curve]


def _mean(curves: Sequence[Sequence[Point]], x: Callable[[Point], float]) -> tuple[list[float], list[float]]:
    """Over seeds, step by step: of place and loss; a step at which a loss is not finite has none."""
    together = list(zip(*curves, strict=True))
    places = [statistics.fmean(x(point) for point in points) for points in together]
    return places, [statistics.fmean(_number(point.nats_per_byte) for point in points) for points in together]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
