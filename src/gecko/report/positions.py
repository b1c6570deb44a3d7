"""Loss by position, with chunk borders and standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gecko.pages.drawing import LIGHT, MIDDLE, chunk_borders, label_line_ends, new_figure, new_panels, svg
from gecko.report.perplexity import token_count
from gecko.report.published import published_statement
from gecko.report.reading import Material
from gecko.report.scores import Evaluated, Model, by_model, collect, partition
from gecko.report.sections import Picture, Section
from gecko.report.tables import PLAIN, Table, score_table

Curve = list[tuple[float, float, float]]
"""Position, mean loss, standard error (NaN where it is not known)."""


def positions_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    """Pictures for each text and segment length."""
    if not items:
        return []
    pictures, tables = [], []
    for group in partition(items, _same_segments):
        models, about = by_model(group), _about(group[0])
        curves = {model: _curve(files, "by_position") for model, files in models.items()}
        pictures.append(Picture(_panels(curves, models), f"Loss by position on {about}. {_BANDS} Grey: the others."))
        within = {model: _curve(files, "in_chunk") for model, files in models.items()}
        pictures.append(Picture(_within(within), f"The same over all chunks but the first, put on top of each other: "
                                                 f"a rise at the left is the border's. {_BANDS}"))  # fmt: skip
        tables.append(_border_table(about, group, material))
    intro = "Every segment is read from a fresh state. Dotted: borders between chunks, where they are looked for."
    return [Section("Loss by position", intro, pictures, tables, published_statement("positions"))]


def _border_table(about: str, items: Sequence[Evaluated], material: Material) -> Table:
    """Models in columns, whatever their chunks."""
    grids = {
        (item.subject, item.norms): f"first {item.settings['first']} of {item.settings['chunk']}" for item in items
    }
    bare = [replace(item, scores=[{**score, "where": {}} for score in item.scores]) for item in items]
    return score_table(
        f"Loss after chunk borders, on {about}", collect(bare, material), PLAIN, heads=["score"],
        names=lambda place: (place.score,), about=lambda model: grids[model.subject, model.norms],
        notes=["The first tokens of each chunk (so many of how many, under the name) are paired with the rest of it. "
               "t and p are each seed's."],
    )  # fmt: skip


_BANDS = "Bands: ± 1 standard error; over seeds, of their mean."


def _same_segments(item: Evaluated) -> tuple[object, ...]:
    return item.texts, item.tokenizer, item.settings["length"], item.settings["segments"]


def _about(item: Evaluated) -> str:
    settings = item.settings
    return item.about(f"{settings['segments']:,} segments of {token_count(settings['length'])} tokens")


def _curve(files: Sequence[Evaluated], name: str) -> Curve:
    """Means over seeds, with the standard error over seeds; of one seed, the evaluation's own, over segments."""
    seeds = [file.details[name] for file in files]
    curve = []
    for points in zip(*seeds, strict=False):
        means = [point["mean"] for point in points]
        own = math.nan if points[0]["standard_error"] is None else points[0]["standard_error"]
        error = own if len(means) == 1 else statistics.stdev(means) / math.sqrt(len(means))
        curve.append((points[0]["position"], statistics.fmean(means), error))
    return curve


def _panels(curves: Mapping[Model, Curve], models: Mapping[Model, Sequence[Evaluated]]) -> str:
    """One panel a model, all with the same scales; the others stand behind in grey."""
    rows = len(curves)
    figure, panels = new_panels("position, tokens", "loss, nats a token", rows, height=1.2 + 1.7 * rows)
    for axes, (model, curve) in zip(panels, curves.items(), strict=True):
        settings = models[model][0].settings
        for border in chunk_borders(settings["length"], settings["chunk"]):
            axes.axvline(border, color=MIDDLE, linewidth=0.7, linestyle=":")
        for other in curves.values():
            if other is not curve:
                axes.plot(*_middles(other), color=LIGHT, linewidth=0.7)
        _draw(axes, curve, model, marked=False)
        axes.set_title(f"{model.label}, a border every {settings['chunk']} tokens", fontsize=11, loc="left")
        axes.set_xlim(0, settings["length"])
        axes.set_ylim(*_frame(curves.values()))
    return svg(figure)


def _within(curves: Mapping[Model, Curve]) -> str:
    figure, axes = new_figure("position in the chunk, tokens", "loss, nats a token")
    for model, curve in curves.items():
        _draw(axes, curve, model, marked=True)
    axes.set_xlim(left=0)
    label_line_ends(axes, [(curve[-1][1], model.style, model.label) for model, curve in curves.items()])
    return svg(figure)


def _draw(axes: Any, curve: Curve, model: Model, *, marked: bool) -> None:
    x, mean = _middles(curve)
    low, high = ([y + sign * error for _, y, error in curve] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=model.style.color, alpha=0.25, linewidth=0)
    line = model.style.line(len(curve)) | {"linewidth": 1.4}
    axes.plot(x, mean, **(line if marked else line | {"marker": "", "linestyle": "-"}))


def _middles(curve: Curve) -> tuple[list[float], list[float]]:
    """Positions at the middle of their bins, and means."""
    width = curve[1][0] - curve[0][0] if len(curve) > 1 else 1
    return [position + width / 2 for position, _, _ in curve], [mean for _, mean, _ in curve]


def _frame(curves: Any) -> tuple[float, float]:
    """All but the first twentieth of each curve, which has little context."""
    settled = [mean for curve in curves for _, mean, _ in curve[len(curve) // 20 :]]
    margin = 0.05 * (max(settled) - min(settled)) or 0.05
    return min(settled) - margin, max(settled) + margin
