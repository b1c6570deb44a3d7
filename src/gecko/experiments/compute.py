"""Loss by training FLOPs: the models that no cheaper one beats, and the power law through them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from gecko.eval.results import Interval, student
from gecko.experiments.figures import Points
from gecko.experiments.rows import HELD_OUT, families
from gecko.experiments.table import Model, Row, by_model, span
from gecko.pages import Cell, Picture, Table, label_line_ends, mark_logarithms, new_figure
from gecko.runtime.process import require

SIZES = ("num_layers", "model_dim", "key_dim", "value_dim", "ffn_dim", "num_heads", "key_value_heads",
         "timestep_groups", "norm_groups")  # fmt: skip
"""Fields of a config in which the models of a family differ."""
LEAST = 3
"""Amounts of compute that a fit needs: two parameters, and a residual for the interval."""
_NOTE = (
    "Models of a family differ in widths, heads and layers alone. Line: loss = a · FLOPs ^ −exponent, by least squares "
    "of logarithms, through the models that none of as many FLOPs or fewer beats (means over seeds). It has no offset: "
    "the exponent holds for this range alone, and falls where the loss nears the entropy of the text. Interval: "
    "Student's t, from the residuals. FLOPs: matrix products, forward and backward."
)


class PowerLaw(NamedTuple):
    """loss = factor · FLOPs ^ −exponent, with the 95 % interval of the exponent."""

    factor: float
    exponent: float
    interval: Interval | None


def power_law(points: Points) -> PowerLaw | None:
    """Return the power law through (FLOPs, loss), by least squares of logarithms; None for fewer than ``LEAST``.

    The interval is Student's t with the slope's standard error from the residuals, n − 2 degrees of freedom.
    """
    if len(points) < LEAST:
        return None
    x, y = zip(*((math.log(flops), math.log(loss)) for flops, loss in points), strict=True)
    found = require("scipy.stats", "eval").linregress(x, y)
    interval = student(-found.slope, found.stderr, len(points) - 1, f"residuals of {len(points)} models")
    return PowerLaw(math.exp(found.intercept), -float(found.slope), interval)


def frontier(points: Points) -> Points:
    """Return the points (FLOPs, loss) that no other one with as many FLOPs or fewer beats, by FLOPs."""
    kept: Points = []
    for flops, loss in sorted(points):
        if not kept or loss < kept[-1][1]:
            kept.append((flops, loss))
    return kept


def compute_part(rows: Sequence[Row]) -> tuple[list[Picture], Table]:
    """Return the picture and the table of the loss by training FLOPs, for final losses on one text.

    A model is a point, the mean over its seeds. There is no picture if no family has two amounts of compute.
    """
    found, lines = dict[Model, Points](), list[list[Cell]]()
    for family, of in families(rows, lambda key: key.startswith("model.") and key[6:] not in SIZES).items():
        points = [(mine[0].case["FLOPs"], fmean(row.value for row in mine)) for mine in by_model(of).values()]
        kept = frontier(points)
        law, none = power_law(kept), f"no fit: it needs {LEAST} amounts of compute"
        ends = " to ".join(dict.fromkeys(f"{flops:.2e}" for flops, _ in (min(points), max(points))))
        fitted: Cell = none if law is None else (f"{law.exponent:.4f}", span(law.interval))
        lines.append([family.label, str(len(points)), ends, str(len(kept)), fitted])
        found[family] = points
    drawn, about = any(len(frontier(points)) > 1 for points in found.values()), rows[0].text[0]
    columns: list[Cell] = ["family", "models", "training FLOPs", "models on the line", ("exponent", "95 % interval")]
    caption = f"Held-out loss by training FLOPs, on {about}. Hollow: a model of as many FLOPs or fewer is better."
    pictures = [Picture(compute_figure(found), caption)] if drawn else []
    return pictures, Table(f"Loss by training FLOPs, on {about}", columns, lines, [_NOTE], folded=not drawn)


def compute_figure(families: Mapping[Model, Points]) -> Any:
    """Plot losses by FLOPs over logarithmic scales; a line is the power law of a family that has one."""
    figure, axes = new_figure("training FLOPs", HELD_OUT)
    axes.set(xscale="log", yscale="log")
    ends = []
    for family, points in families.items():
        kept, style, label = frontier(points), family.style, family.label
        for point in points:
            axes.plot(*point, style.marker, color=style.color, fillstyle="full" if point in kept else "none")
        law, end = power_law(kept), kept[-1][1]
        if law is not None:
            places = [kept[0][0], kept[-1][0]]
            losses = [law.factor * flops**-law.exponent for flops in places]
            axes.plot(places, losses, color=style.color, linestyle=style.dashes)
            end, label = losses[-1], f"{label}: exponent {law.exponent:.3f} ({span(law.interval, '{:.3f}'.format)})"
        ends.append((end, style, label))
    mark_logarithms(axes.xaxis, axes.yaxis)
    label_line_ends(axes, ends)
    return figure
