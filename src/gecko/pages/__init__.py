"""Self-contained HTML pages: sections with pictures, tables and texts, in one form for all commands, and their figures.

The page uses system fonts, pictures as wide as the page, and wide tables that scroll. If the system is set to dark
mode, the page is dark, and it inverts the lightness of the pictures. Figures are readable in greyscale at half width.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from gecko.io.files import write_text
from gecko.runtime.process import require

Cell = str | tuple[str, str]
"""Text of a table, or a text with small print below it."""


@dataclass(frozen=True)
class Table:
    """A table; without columns it has no head. The first ``heads`` cells of a row name it."""

    title: str
    columns: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    heads: int = 1
    folded: bool = False
    """Whether the page shows only the title until it is clicked."""
    published: bool = False
    """Whether the numbers are printed in the paper, and not measured here."""


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure with its caption. Small pictures are side by side if the page is wide enough."""

    figure: Any
    caption: str
    small: bool = False


@dataclass(frozen=True)
class Listing:
    """A command, or another text of which every character counts; ``bold`` is its beginning."""

    text: str
    lead: str = ""
    title: str = ""
    bold: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a page."""

    title: str
    intro: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[Listing] = ()


def write_page(path: Path, title: str, summary: str, sections: Sequence[Section]) -> None:
    """Write a page atomically, all texts escaped; ImportError without Jinja, OSError if it could not be written."""
    environment = require("jinja2", "train").Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources.files(__name__) / "page.html.j2").read_text(encoding="utf-8"))
    html = template.render(title=title, summary=summary, sections=sections, svg=svg).lstrip()
    write_text(path, html + "\n")


def is_page(path: Path) -> bool:
    """Return whether ``write_page`` wrote the file."""
    with path.open("rb") as file:
        start = file.read(1 << 12)
    return re.match(rb'<!doctype html>.*<meta name="generator" content="gecko">', start, re.DOTALL) is not None


def pairs(title: str, values: Mapping[str, object], *, folded: bool = False) -> Table:
    """Return a table of names and values."""
    return Table(title, (), [(name, str(value)) for name, value in values.items()], folded=folded)


def settings_tables(settings: Mapping[str, Any]) -> list[Table]:
    """Return one folded table for each part of the names before the first dot; names without a dot come first."""
    groups: dict[str, dict[str, Any]] = {"run": {}}
    for name, value in settings.items():
        groups.setdefault(name.partition(".")[0] if "." in name else "run", {})[name] = value
    return [pairs(name.replace("_", " ").capitalize(), group, folded=True) for name, group in groups.items()]


DARK, MIDDLE, LIGHT = "#1b1b1b", "#7a7a7a", "#9a9a9a"
_COLORS = ("#1b4f72", "#c2570c", "#2e7d32", "#8e24aa", "#00838f", "#b71c1c", "#5d4037", "#424242")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (9, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "X", "P", "<", ">")
_LABEL_WIDTH, _LINE_HEIGHT = 22, 0.07
_MAX_BORDERS = 40


@dataclass(frozen=True)
class LineStyle:
    """Color, dashes and marker of a line; two of them distinguish lines without color."""

    color: str
    dashes: Any
    marker: str

    @classmethod
    def of(cls, number: int) -> LineStyle:
        """Return the style of the line with this number. Styles repeat only after hundreds."""
        dashes, marker = _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)]
        return cls(_COLORS[number % len(_COLORS)], dashes, marker)

    def line(self, points: int) -> dict[str, Any]:
        """Return matplotlib arguments for a line through ``points`` points, with markers at about ten of them."""
        return {
            "color": self.color, "linestyle": self.dashes, "linewidth": 1.7, "marker": self.marker, "markersize": 5,
            "markevery": max(1, points // 10),
        }  # fmt: skip


def new_figure(xlabel: str, ylabel: str, *, height: float = 3.6, width: float = 6.6) -> tuple[Any, Any]:
    """Return a figure of the width of a page (sizes in inches) and its axes."""
    figure, (axes,) = new_panels(xlabel, "", 1, height=height, width=width)
    axes.set_ylabel(ylabel, fontsize=12)
    return figure, axes


def new_panels(xlabel: str, ylabel: str, rows: int, *, height: float, width: float = 6.6) -> tuple[Any, list[Any]]:
    """Return a figure with ``rows`` axes below each other, which share both scales."""
    figure = require("matplotlib.figure", "train").Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(rows, 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    for axes in panels:
        axes.tick_params(labelsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(xlabel, fontsize=12)
    if ylabel:
        figure.supylabel(ylabel, fontsize=12)
    return figure, panels


def svg(figure: Any) -> str:
    """Return the figure as SVG text without the XML preamble; the same text for the same figure."""
    text = io.StringIO()
    for written in figure.findobj(require("matplotlib.text", "train").Text):
        if "$" in written.get_text():  # a name, no formula; the formulas of ticks are made when the figure is drawn
            written.set_parse_math(False)
    with require("matplotlib", "train").rc_context({"svg.hashsalt": "gecko"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    content = text.getvalue()
    return content[content.index("<svg") :]


def fit(axes: Any, values: Sequence[float], margin: float, least: float = 0.1) -> None:
    """Fit the vertical axis to the finite values, with ``margin`` times their range above and below,
    or ``least`` if their range is 0."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        space = margin * (max(finite) - min(finite)) or least
        axes.set_ylim(min(finite) - space, max(finite) + space)


def mark_logarithms(*axis: Any) -> None:
    """Mark each final logarithmic axis with a few plain numbers."""
    ticker = require("matplotlib.ticker", "train")
    for one in axis:
        low, high = one.get_view_interval()
        subs = (1, 2, 5) if high < 1000 * low else (1,)
        one.set_major_locator(ticker.MaxNLocator(5) if high < 4 * low else ticker.LogLocator(subs=subs, numticks=9))
        one.set_major_formatter("{x:g}")
        one.set_minor_formatter("")


def label_line_ends(axes: Any, ends: Sequence[tuple[float, LineStyle, str]]) -> None:
    """Label lines at the right of the axes, each label with a piece of its line.

    A label is at the height of its line's end, or moved as little as needed to not overlap others. Call this after the
    scales are final. ``ends`` has (y of the line's end, style, name) of each line.
    """
    names = [textwrap.fill(name, _LABEL_WIDTH) for _, _, name in ends]
    heights = [_LINE_HEIGHT * (name.count("\n") + 1) for name in names]
    to_share = axes.transData + axes.transAxes.inverted()
    right = axes.get_xlim()[1]
    shares = [min(max(float(to_share.transform((right, y))[1]), 0.0), 1.0) for y, _, _ in ends]
    for (_, style, _), name, place in zip(ends, names, spread_apart(shares, heights), strict=True):
        piece = style.line(2) | {"markevery": [1], "clip_on": False, "transform": axes.transAxes}
        axes.plot([1.02, 1.06, 1.10], [place] * 3, scalex=False, scaley=False, **piece)
        axes.text(1.12, place, name, color=style.color, fontsize=11, va="center", linespacing=1.0,
                  transform=axes.transAxes)  # fmt: skip


def spread_apart(centers: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return centers moved as little as needed so that intervals of these heights do not overlap, in 0..1 if they fit.

    The order does not change. If all intervals stood on each other from 0, the wanted shifts from there must not fall
    from one to the next: neighbours for which they do share their mean (isotonic regression).
    """
    order = sorted(range(len(centers)), key=lambda i: centers[i])
    stacked = [sum(heights[i] for i in order[:place]) + heights[index] / 2 for place, index in enumerate(order)]
    blocks: list[list[float]] = []
    for index, bottom in zip(order, stacked, strict=True):
        blocks.append([centers[index] - bottom])
        while len(blocks) > 1 and fmean(blocks[-2]) >= fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    room = max(0.0, 1 - sum(heights))
    shifts = [min(max(fmean(block), 0.0), room) for block in blocks for _ in block]
    places = {index: shift + bottom for index, shift, bottom in zip(order, shifts, stacked, strict=True)}
    return [places[index] for index in range(len(centers))]


def chunk_borders(length: int, chunk_size: int) -> list[int]:
    """Return the chunk borders to mark: all, or every n-th if there are more than can be seen."""
    return list(range(0, length, chunk_size * border_stride(length, chunk_size)))[1:]


def border_stride(length: int, chunk_size: int) -> int:
    return max(1, math.ceil(length / chunk_size / _MAX_BORDERS))
