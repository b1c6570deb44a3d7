"""Figures and tables of rows: losses by step and by FLOPs, scores by case, losses by position, and maps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gecko import pages
from gecko.eval.results import Interval, methods, readable, standard_error, student
from gecko.experiments.rows import (
    HELD_OUT,
    TRAINING_LOSS,
    Model,
    Row,
    by_model,
    estimate,
    families,
    grouped,
    token_count,
)
from gecko.pages import DARK, LIGHT, MIDDLE, Cell, LineStyle, Picture, Table, label_line_ends, new_figure
from gecko.runtime.process import require

_SETTLED = 0.25
"""Fraction of a run after which its loss determines the picture's frame."""
_FEW = 4
"""With fewer losses after it, all losses of the run determine the frame."""
_TALLEST = 1.5
"""Upper limit of the picture relative to the worst model's best perplexity, so that outliers do not flatten it."""
_MAP_WIDTH = 4.2
_GUESSING = LineStyle(DARK, (0, (2, 2)), "")

Points = list[tuple[float, float]]


class Unit(NamedTuple):
    """Unit and number format of values."""

    shown: Callable[[float], str]
    name: str
    limits: tuple[float, float] | None = None
    """Values of 0 and 100 %, for proportions."""


PLAIN = Unit(readable, "")
PERCENT = Unit(lambda share: f"{100 * share:.1f}", "%", (0, 1))
"""Unit of proportions in 0..1."""
OF_HUNDRED = Unit(lambda score: f"{score:.1f}", "%", (0, 100))
"""Unit of scores that are already in percent."""


def span(interval: Interval | None, shown: Callable[[float], str] = readable) -> str:
    """Format an interval."""
    return "no interval" if interval is None else f"{shown(interval.low)} to {shown(interval.high)}"


NOT_AVERAGED = ("t", "p, two-sided")
"""Scores that are not averaged over seeds; the score of each seed is shown."""


def score_table(
    title: str, rows: Sequence[Row], heads: Mapping[str, Callable[[Row], str]], unit: Unit = PLAIN, *,
    notes: Iterable[str] = (), folded: bool = False, about: Callable[[Row], str] = lambda _: "",
) -> Table:  # fmt: skip
    """Return a table with one column per model and one line per score and case.

    Args:
        heads: names of the first columns, with the text of each.
        about: function that returns further small print under a model's name.
    """
    models, lines, intervals = by_model(rows), [], []

    def cell(seeds: Sequence[Row]) -> Cell:
        n = counts(seeds)
        if seeds[0].score in NOT_AVERAGED:
            return "; ".join(unit.shown(row.value) for row in seeds), f"n {n}"
        mean, interval = estimate(seeds, unit.limits)
        intervals.append(interval)
        return unit.shown(mean), f"{span(interval, unit.shown)}; n {n}{' for each seed' if len(seeds) > 1 else ''}"

    def detail(mine: Sequence[Row]) -> str:
        known = [str(seed) for seed in dict.fromkeys(row.seed for row in mine) if seed is not None]
        words = f"{'seed' if len(known) == 1 else 'seeds'} {', '.join(known)}" if known else "seed not known"
        sizes = [row.file.record["model"]["parameters"] for row in mine if "parameters" in row.file.record["model"]]
        return f"{words}; {sizes[0]:,} parameters" if sizes else words

    for of_place in grouped(rows, lambda row: row.place).values():
        found = by_model(of_place)
        cells = [cell(found[model]) if model in found else "" for model in models]
        lines.append([*(text(of_place[0]) for text in heads.values()), *cells])
    columns = [(model.label, f"{detail(mine)} {about(mine[-1])}".strip()) for model, mine in models.items()]
    small = f"Values in {unit.name}. " if unit.name else ""
    legend = f"{small}Below each value its 95 % interval and n. Intervals: {methods(intervals) or 'none'}."
    return Table(title, [*heads, *columns], lines, [legend, *notes], len(heads), folded)


def counts(rows: Sequence[Row]) -> str:
    """Return the sample size of each seed as text."""
    found = sorted({row.n for row in rows})
    return " to ".join(dict.fromkeys(f"{n:,}" for n in (found[0], found[-1]))) + f" {rows[0].unit}"


def check_packages() -> None:
    """Raise ImportError if a package for pictures, the page or intervals is not installed."""
    for module, extra in (("scipy.stats", "eval"), ("matplotlib.figure", "train"), ("jinja2", "train")):
        require(module, extra)


def by_seed(rows: Sequence[Row]) -> list[list[Row]]:
    return list(grouped(rows, lambda row: row.seed).values())


def mean_by_step(rows: Sequence[Row], x: str) -> Points:
    """Return the means of place and loss over the seeds of a model, at the steps that all of them have."""
    seeds, at_steps = len(by_seed(rows)), grouped(rows, lambda row: row.case["step"]).values()
    return [(statistics.fmean(row.case[x] for row in group), statistics.fmean(row.value for row in group))
            for group in at_steps if len(by_seed(group)) == seeds]  # fmt: skip


AXES = (
    (HELD_OUT, "tokens", "tokens read"), (HELD_OUT, "minutes", "minutes in training steps"),
    (TRAINING_LOSS, "tokens", "tokens read"),
)  # fmt: skip
"""Score, name of the place in the row's case, and its words."""


def loss_pictures(
    rows: Sequence[Row], leave_out: Callable[[str, str], None], axes: Sequence[tuple[str, str, str]] = AXES
) -> list[Picture]:
    """Return the pictures of the losses by step, for rows of the same texts.

    Args:
        leave_out: called with a model and the reason if a loss is not shown for all its seeds.
    """
    pictures, seeds = [], {model: len(by_seed(mine)) for model, mine in by_model(rows).items()}
    for score, x, xlabel in axes:
        what, shown = score.partition(",")[0], []
        measured = by_model(row for row in rows if row.score == score and x in row.case)
        for model, count in seeds.items():
            mine = measured.get(model, [])
            if len(by_seed(mine)) < count:
                leave_out(model.label, f"{what}: not measured in every run")
            if mean_by_step(mine, x):
                shown += mine
            elif mine:
                leave_out(model.label, f"{what}: at no step measured with all seeds")
        if shown:
            about = f"{what.capitalize()} by {xlabel}, on {rows[0].text[0]}. The start may lie outside the frame."
            pictures.append(Picture(loss_figure(shown, x, xlabel, score), about))
    return pictures


def loss_figure(rows: Sequence[Row], x: str, xlabel: str, ylabel: str) -> Any:
    """Plot losses of runs: seeds as thin lines, their mean as a thick line. The frame fits the settled losses."""
    figure, axes = new_figure(xlabel, ylabel)
    ends, settled = [], []
    for model, mine in by_model(rows).items():
        seeds, main = by_seed(mine), mean_by_step(mine, x)
        lines = [[(row.case[x], row.value) for row in seed] for seed in seeds]
        for line in lines if len(lines) > 1 else []:
            axes.plot(*zip(*line, strict=True), color=model.style.color, linewidth=0.6, alpha=0.6)
        axes.plot(*zip(*main, strict=True), **model.style.line(len(main)))
        for line in (main, *lines):
            late = [loss for place, loss in line if place >= _SETTLED * line[-1][0]]
            settled += late if len(late) >= _FEW else [loss for _, loss in line]
        ends.append((main[-1][1], model.style, model.label))
    pages.fit(axes, settled, 0.06)
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(nbins=6)
    if x == "tokens":
        axes.xaxis.set_major_formatter(require("matplotlib.ticker", "train").EngFormatter(sep=" "))
    label_line_ends(axes, ends)
    return figure


def _means(
    rows: Sequence[Row], x: str, limits: tuple[float, float] | None = None
) -> tuple[list[Any], list[float], Any]:
    """Return places, means over seeds and the distances to the ends of their intervals (0 without one)."""
    places = dict(sorted(grouped(rows, lambda row: row.case[x]).items()))
    found = [estimate(seeds, limits) for seeds in places.values()]
    below = [0.0 if interval is None else max(0.0, mean - interval.low) for mean, interval in found]
    above = [0.0 if interval is None else max(0.0, interval.high - mean) for mean, interval in found]
    return list(places), [mean for mean, _ in found], [below, above]


def length_figure(lines: Mapping[Model, Sequence[Row]], x: str, xlabel: str, ylabel: str) -> Any:
    """Plot scores by a length: the mean over seeds, and the seeds; for one seed with its interval.

    The frame of perplexities leaves out outliers; other scores have a logarithmic scale.
    """
    figure, axes = new_figure(xlabel, ylabel)
    ends, lowest, highest = [], [], 0.0
    for model, mine in lines.items():
        places, means, bars = _means(mine, x)
        seeds, line = by_seed(mine), model.style.line(len(means)) | {"markevery": 1}
        axes.errorbar(places, means, yerr=bars if len(seeds) == 1 else None, capsize=2.5, elinewidth=0.9, **line)
        for seed in seeds if len(seeds) > 1 else []:
            points = sorted((row.case[x], row.value) for row in seed)
            axes.plot(*zip(*points, strict=True), color=model.style.color, linewidth=0.6, alpha=0.6)
        lowest.append(min(means))
        highest = max(highest, *means)
        ends.append((means[-1], model.style, model.label))
    ticks = sorted({row.case[x] for rows in lines.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [token_count(tick) for tick in ticks])
    axes.minorticks_off()
    if x != "context":
        axes.set_yscale("log")
        pages.mark_logarithms(axes.yaxis)
    elif highest > _TALLEST * max(lowest):
        axes.set_ylim(top=_TALLEST * max(lowest))
    label_line_ends(axes, ends)
    return figure


def distance_figure(rows: Sequence[Row], x: str, guessing: float) -> Any:
    """Plot each model's mean accuracy, with error bars, by the distance ``case[x]``; a line shows ``guessing``."""
    figure, axes = new_figure("chunks from the answer to its question", "accuracy, %")
    models, ends = by_model(rows), []
    for number, (model, mine) in enumerate(models.items()):
        places, means, bars = _means([row for row in mine if row.case[x] != "any"], x, PERCENT.limits)
        aside, line = 0.05 * (number - (len(models) - 1) / 2), model.style.line(len(means)) | {"markevery": 1}
        shares, reach = [100 * mean for mean in means], [[100 * one for one in side] for side in bars]
        axes.errorbar([place + aside for place in places], shares, yerr=reach, capsize=2.5, elinewidth=0.9, **line)
        ends.append((shares[-1], model.style, model.label))
    axes.axhline(100 * guessing, color=DARK, linewidth=1, linestyle=_GUESSING.dashes)
    axes.set_ylim(-3, 103)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_line_ends(axes, [*ends, (100 * guessing, _GUESSING, "guessing")])
    return figure


Curve = list[tuple[float, float, float]]
"""Middle of the bin, mean loss, and standard error (NaN if unknown)."""


def position_curves(rows: Sequence[Row]) -> dict[Model, Curve]:
    """Return the means over seeds by position; the error is that of the mean over seeds, for one seed its own."""
    curves = dict[Model, Curve]()
    for model, mine in by_model(rows).items():
        places = grouped(mine, lambda row: row.case["position"])
        starts, whole, curves[model] = list(places), len(by_seed(mine)), []
        width = starts[1] - starts[0] if len(starts) > 1 else 1
        for start, seeds in places.items():
            values, own = [row.value for row in seeds], seeds[0].interval
            error = standard_error(values)
            if error is None:
                error = math.nan if own is None else own.high - values[0]
            if len(seeds) == whole:
                curves[model].append((start + width / 2, statistics.fmean(values), error))
    return curves


def panels_figure(curves: Mapping[Model, Curve], chunks: Mapping[Model, int], length: int) -> Any:
    """Draw one panel per model with its chunk borders and the same scales, and the other models in grey."""
    rows = len(curves)
    figure, panels = pages.new_panels("position, tokens", "loss, nats per token", rows, height=1.2 + 1.7 * rows)
    # The first positions have little context: without them the frame fits the rest.
    settled = [mean for curve in curves.values() for _, mean, _ in curve[len(curve) // 20 :]]
    for axes, (model, curve) in zip(panels, curves.items(), strict=True):
        for border in pages.chunk_borders(length, chunks[model]):
            axes.axvline(border, color=MIDDLE, linewidth=0.7, linestyle=":")
        for other in curves.values():
            if other is not curve:
                axes.plot([x for x, _, _ in other], [mean for _, mean, _ in other], color=LIGHT, linewidth=0.7)
        _draw_curve(axes, curve, model, marker="", linestyle="-")
        axes.set_title(f"{model.label}, a border every {chunks[model]} tokens", fontsize=11, loc="left")
        axes.set_xlim(0, length)
        pages.fit(axes, settled, 0.05, 0.05)
    return figure


def within_figure(curves: Mapping[Model, Curve]) -> Any:
    """Plot the loss by position in the chunk."""
    figure, axes = new_figure("position in the chunk, tokens", "loss, nats per token")
    for model, curve in curves.items():
        _draw_curve(axes, curve, model)
    axes.set_xlim(left=0)
    label_line_ends(axes, [(curve[-1][1], model.style, model.label) for model, curve in curves.items()])
    return figure


def _draw_curve(axes: Any, curve: Curve, model: Model, **changes: Any) -> None:
    x, mean, _ = zip(*curve, strict=True)
    low, high = ([y + sign * error for _, y, error in curve] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=model.style.color, alpha=0.25, linewidth=0)
    axes.plot(x, mean, **(model.style.line(len(curve)) | {"linewidth": 1.4, **changes}))


def map_figure(rows: Sequence[Row], depth_name: Callable[[Any], str]) -> Any:
    """Draw a map of the scores: length to the right, depth downwards, and a number in every measured cell."""
    places = grouped(rows, lambda row: (row.case["length"], row.case["depth"]))
    shares = {place: estimate(seeds)[0] for place, seeds in places.items()}
    lengths = sorted({length for length, _ in shares})
    depths = sorted({depth for _, depth in shares}, key=lambda depth: 2.0 if isinstance(depth, str) else depth)
    height = 1.3 + 0.5 * len(depths)
    figure, axes = new_figure("length, tokens", "depth of the needle", height=height, width=_MAP_WIDTH)
    table = [[shares.get((length, depth), math.nan) for length in lengths] for depth in depths]
    axes.pcolormesh(table, cmap="Blues", vmin=0, vmax=1, edgecolors=MIDDLE, linewidth=0.5)
    for y, values in enumerate(table):
        for x, share in enumerate(values):
            text, color = "–" if math.isnan(share) else f"{100 * share:.0f}", "white" if share > 0.55 else DARK
            axes.text(x + 0.5, y + 0.5, text, color=color, ha="center", va="center", fontsize=12)
    axes.invert_yaxis()
    axes.set_xticks([place + 0.5 for place in range(len(lengths))], [token_count(length) for length in lengths])
    axes.set_yticks([place + 0.5 for place in range(len(depths))], [depth_name(depth) for depth in depths])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


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
        points = [(one[0].case["FLOPs"], statistics.fmean(row.value for row in one)) for one in by_model(of).values()]
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
    pages.mark_logarithms(axes.xaxis, axes.yaxis)
    label_line_ends(axes, ends)
    return figure
