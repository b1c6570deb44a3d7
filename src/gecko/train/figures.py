"""The pictures of a training report, as inline SVG that needs no other file."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from gecko.extras import require
from gecko.train.metrics import Record

_MAX_BORDERS = 40
_DARK, _LIGHT = "#1b1b1b", "#9a9a9a"


def loss_curve(training: Sequence[Record], validation: Sequence[Record]) -> str:
    """Training loss (thin, and smoothed) and held-out loss (dots) over steps."""
    figure, axes = _figure("optimizer step", "loss, nats a token")
    points = [(r["step"], r["loss"]) for r in training if r["loss"] is not None]
    axes.plot(*_columns(points), color=_LIGHT, linewidth=0.7, alpha=0.7, label="training, each step")
    axes.plot(*_columns(_smoothed(points)), color="#2a6f97", linewidth=1.6, label="training, smoothed")
    held_out = [(r["step"], r["loss"]) for r in validation if r["loss"] is not None]
    axes.plot(*_columns(held_out), color=_DARK, linewidth=1.2, linestyle="--", marker="o", markersize=4,
              label="held out")  # fmt: skip
    tail = [loss for _, loss in points[len(points) // 20 :]] + [loss for _, loss in held_out[-1:]]
    if tail:
        axes.set_ylim(min(tail) - 0.1, max(tail) + 0.1)
    axes.legend(frameon=False)
    return _svg(figure)


def loss_by_position(losses: Sequence[float | None], bin_width: int, chunk_size: int) -> str:
    """Held-out loss over the position in the row, with a vertical line at chunk borders."""
    figure, axes = _figure("position in the row, tokens", "held-out loss, nats a token")
    length = len(losses) * bin_width
    for border in chunk_borders(length, chunk_size):
        axes.axvline(border, color="#7a7a7a", linewidth=0.8, linestyle=":")
    values = [math.nan if loss is None else loss for loss in losses]
    axes.plot([(i + 0.5) * bin_width for i in range(len(values))], values, color="#2a6f97", linewidth=1.6)
    settled = [value for value in values[len(values) // 20 :] if math.isfinite(value)]
    if settled:
        # The first few positions have no context to go by; their loss would flatten all the rest.
        axes.set_ylim(min(settled) - 0.05, max(settled) + 0.05)
    axes.set_xlim(0, length)
    return _svg(figure)


def chunk_borders(length: int, chunk_size: int) -> list[int]:
    """The borders to mark: all of them, or every n-th where all would be too many to see."""
    return list(range(0, length, chunk_size * border_stride(length, chunk_size)))[1:]


def border_stride(length: int, chunk_size: int) -> int:
    return max(1, math.ceil(length / chunk_size / _MAX_BORDERS))


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means of about fifty equal groups of steps, each at the middle of its group."""
    width = max(1, len(points) // 50)
    groups = [points[start : start + width] for start in range(0, len(points) - width + 1, width)]
    return [(group[len(group) // 2][0], sum(loss for _, loss in group) / width) for group in groups]


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _figure(xlabel: str, ylabel: str) -> tuple[Any, Any]:
    figure = require("matplotlib.figure", "train").Figure(figsize=(6.6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(xlabel, fontsize=12)
    axes.set_ylabel(ylabel, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    """The figure without the XML preamble, and scaled by its box: width and height are left to the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
