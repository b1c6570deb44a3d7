"""The pictures of a training report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gecko.pages.drawing import DARK, LIGHT, MIDDLE, chunk_borders, new_figure, svg
from gecko.train.metrics import Record

_BLUE = "#2a6f97"


def loss_curve(training: Sequence[Record], validation: Sequence[Record]) -> str:
    """Training loss (thin, and smoothed) and held-out loss (dots) over steps."""
    figure, axes = new_figure("optimizer step", "loss, nats a token")
    points = [(r["step"], r["loss"]) for r in training if r["loss"] is not None]
    axes.plot(*_columns(points), color=LIGHT, linewidth=0.7, alpha=0.7, label="training, each step")
    axes.plot(*_columns(smoothed(points)), color=_BLUE, linewidth=1.6, label="training, smoothed")
    held_out = [(r["step"], r["loss"]) for r in validation if r["loss"] is not None]
    axes.plot(*_columns(held_out), color=DARK, linewidth=1.2, linestyle="--", marker="o", markersize=4,
              label="held out")  # fmt: skip
    tail = [loss for _, loss in points[len(points) // 20 :]] + [loss for _, loss in held_out[-1:]]
    if tail:
        axes.set_ylim(min(tail) - 0.1, max(tail) + 0.1)
    axes.legend(frameon=False)
    return svg(figure)


def loss_by_position(losses: Sequence[float | None], bin_width: int, chunk_size: int | None) -> str:
    """Held-out loss over the position in the row, with a vertical line at chunk borders if there are any."""
    figure, axes = new_figure("position in the row, tokens", "held-out loss, nats a token")
    length = len(losses) * bin_width
    for border in [] if chunk_size is None else chunk_borders(length, chunk_size):
        axes.axvline(border, color=MIDDLE, linewidth=0.8, linestyle=":")
    values = [math.nan if loss is None else loss for loss in losses]
    axes.plot([(i + 0.5) * bin_width for i in range(len(values))], values, color=_BLUE, linewidth=1.6)
    settled = [value for value in values[len(values) // 20 :] if math.isfinite(value)]
    if settled:
        # The first few positions have no context to go by; their loss would flatten all the rest.
        axes.set_ylim(min(settled) - 0.05, max(settled) + 0.05)
    axes.set_xlim(0, length)
    return svg(figure)


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of about fifty equal groups of points, each at the middle of its group."""
    width = max(1, len(points) // 50)
    groups = [points[start : start + width] for start in range(0, len(points) - width + 1, width)]
    return [(group[len(group) // 2][0], sum(loss for _, loss in group) / width) for group in groups]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
