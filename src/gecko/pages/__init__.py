"""Self-contained HTML pages from Jinja templates, and figures as inline SVG, readable in greyscale at half width.

All templates extend ``base.html.j2``: system fonts, pictures as wide as the page, and wide tables that scroll.
If the system is set to dark mode, the page is dark, and it inverts the lightness of the pictures.
``parts.html.j2`` has the macros for pictures and for tables of names and values.
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
from typing import Any

from gecko.io.files import whole_file
from gecko.runtime.process import require


def write_html(path: Path, template: str, **values: Any) -> None:
    """Fill a template with ``values`` and write the page atomically. All values are escaped.

    Args:
        template: package and file, such as ``gecko.pages/report.html.j2``. Templates name each other in the same way.

    Raises:
        ImportError: Jinja is not installed.
        OSError: the page could not be written.
    """
    jinja = require("jinja2", "train")
    environment = jinja.Environment(
        loader=jinja.FunctionLoader(_source), undefined=jinja.StrictUndefined, autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    html = environment.get_template(template).render(**values)
    with whole_file(path) as temporary:
        temporary.write_text(html, encoding="utf-8")


def is_page(path: Path) -> bool:
    """Return whether ``write_html`` wrote the file."""
    with path.open("rb") as file:
        return (
            re.match(rb'<!doctype html>.*<meta name="generator" content="gecko">', file.read(1 << 12), re.DOTALL)
            is not None
        )


def _source(template: str) -> str:
    package, _, file = template.partition("/")
    return (resources.files(package) / file).read_text(encoding="utf-8")


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
        return cls(
            _COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)]
        )  # fmt: skip

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
    """Return the figure as SVG text without the XML preamble. The page sets width and height.

    The same figure gives the same text.
    """
    text = io.StringIO()
    for written in figure.findobj(require("matplotlib.text", "train").Text):
        if "$" in written.get_text():  # a name, no formula; the formulas of ticks are made when the figure is drawn
            written.set_parse_math(False)
    with require("matplotlib", "train").rc_context({"svg.hashsalt": "gecko"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    content = text.getvalue()
    return content[content.index("<svg") :]


def group_settings(settings: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Group settings with dotted names by the part before the first dot; those without a dot come first, as "Run"."""
    groups: dict[str, dict[str, str]] = {"Run": {}}
    for name, value in settings.items():
        group = name.partition(".")[0] if "." in name else "run"
        groups.setdefault(group.replace("_", " ").capitalize(), {})[name] = str(value)
    return groups


def label_line_ends(axes: Any, ends: Sequence[tuple[float, LineStyle, str]]) -> None:
    """Label lines at the right of the axes, each label with a piece of its line.

    A label is at the height of its line's end, or moved as little as needed to not overlap others. Call this after the
    scales are final.

    Args:
        ends: (y of the line's end, style, name) of each line.
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

    The order does not change. Overlapping neighbours become one block, centered on the mean of their wanted places.
    """
    order = sorted(range(len(centers)), key=lambda i: centers[i])
    blocks: list[tuple[float, list[int]]] = []
    for index in order:
        blocks.append((_block_center([index], centers, heights), [index]))
        while len(blocks) > 1 and _top(blocks[-2], heights) > _bottom(blocks[-1], heights):
            (_, upper), (_, lower) = blocks.pop(), blocks.pop()
            members = lower + upper
            blocks.append((_block_center(members, centers, heights), members))
    places = [0.0] * len(centers)
    for block in blocks:
        bottom = _bottom(block, heights)
        for index in block[1]:
            places[index] = bottom + heights[index] / 2
            bottom += heights[index]
    return places


def _block_center(members: Sequence[int], centers: Sequence[float], heights: Sequence[float]) -> float:
    """Return the center of the block for which the mean displacement of its members is 0."""
    total = sum(heights[index] for index in members)
    below, wanted = 0.0, []
    for index in members:
        wanted.append(centers[index] - below - heights[index] / 2 + total / 2)
        below += heights[index]
    return max(total / 2, min(1 - total / 2, sum(wanted) / len(wanted)))


def _bottom(block: tuple[float, list[int]], heights: Sequence[float]) -> float:
    return block[0] - sum(heights[index] for index in block[1]) / 2


def _top(block: tuple[float, list[int]], heights: Sequence[float]) -> float:
    # Blocks that only touch must not be merged because of rounding.
    return block[0] + sum(heights[index] for index in block[1]) / 2 - 1e-9


def chunk_borders(length: int, chunk_size: int) -> list[int]:
    """Return the chunk borders to mark: all, or every n-th if there are more than can be seen."""
    return list(range(0, length, chunk_size * border_stride(length, chunk_size)))[1:]


def border_stride(length: int, chunk_size: int) -> int:
    return max(1, math.ceil(length / chunk_size / _MAX_BORDERS))
