"""Sections on perplexity by context length, and on loss by position with chunk borders."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gecko.experiments.report.material import Material
from gecko.experiments.report.models import Evaluated, Model, Scores, by_model, collect, partition
from gecko.experiments.report.tables import (
    PLAIN,
    Picture,
    Section,
    Table,
    error_bars,
    estimate,
    published_statement,
    score_table,
)
from gecko.pages import LIGHT, MIDDLE, chunk_borders, label_line_ends, new_figure, new_panels, svg

_DRAWN = "perplexity, token"
_TALLEST = 1.5
"""Upper limit of the picture relative to the worst model's best perplexity, so that outliers do not flatten it."""

_MARKS = "Thin lines: seeds; bars, for one seed: 95 %. Values above the frame are in the table."


def perplexity_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    """Return the section with one picture per text and tokenizer; other perplexities cannot be compared."""
    if not items:
        return []
    pictures, tables = [], []
    for group in partition(items, _same_tokens):
        scores = collect(group, material)
        texts = group[0].about(f"{group[0].scores[0]['n']:,} tokens")
        pictures.append(Picture(_curves(scores), f"Perplexity per token by context, on {texts}. {_MARKS}"))
        tables.append(score_table(
            f"Perplexity on {texts}", scores, PLAIN, folded=True, heads=["context", "score"],
            names=lambda place: (f"{place['context']:,}", place.score),
        ))  # fmt: skip
    intro = (
        "The same tokens are scored at every context length, each segment from an empty state. The changes in the "
        "table, paired by block, show whether a longer context helps."
    )
    if len(pictures) > 1:
        intro += " Other texts or tokenizers have their own pictures; between tokenizers compare bits per byte."
    return [Section("Perplexity by context length", intro, pictures, tables, published_statement("perplexity"))]


def _same_tokens(item: Evaluated) -> tuple[object, ...]:
    return item.texts, item.tokenizer, item.details.get("bytes"), item.scores[0]["n"]


def _curves(models: Mapping[Model, Scores]) -> str:
    figure, axes = new_figure("context length, tokens", "perplexity per token")
    ends, lowest, highest = [], [], 0.0
    for model, scores in models.items():
        by_context = {place["context"]: seeds for place, seeds in scores.items() if place.score == _DRAWN}
        means = _draw_perplexity(axes, model, dict(sorted(by_context.items())))
        lowest.append(min(means))
        highest = max(highest, *means)
        ends.append((means[-1], model.style, model.label))
    ticks = sorted({place["context"] for scores in models.values() for place in scores})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [token_count(tick) for tick in ticks])
    axes.minorticks_off()
    if highest > _TALLEST * max(lowest):
        axes.set_ylim(top=_TALLEST * max(lowest))
    label_line_ends(axes, ends)
    return svg(figure)


def _draw_perplexity(axes: Any, model: Model, places: Mapping[int, Mapping[Any, Mapping[str, Any]]]) -> list[float]:
    """Draw the means with intervals or seeds, and return the means."""
    line, contexts = model.style.line(len(places)) | {"markevery": 1}, list(places)
    found = [estimate(list(seeds.values())) for seeds in places.values()]
    means = [one.mean for one in found]
    if len(model.seeds) == 1:
        axes.errorbar(contexts, means, yerr=error_bars(found), capsize=2.5, elinewidth=0.9, **line)
        return means
    axes.plot(contexts, means, **line)
    for seed in model.seeds:
        mine = [(context, seeds[seed]["value"]) for context, seeds in places.items() if seed in seeds]
        axes.plot(*zip(*mine, strict=True), color=model.style.color, linewidth=0.6, alpha=0.6)
    return means


def token_count(tokens: int) -> str:
    """Format a number of tokens as commands accept it, such as ``16K`` or ``4M``."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


Curve = list[tuple[float, float, float]]
"""Position, mean loss, and standard error (NaN if unknown)."""


def positions_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    """Return the section with pictures for each text and segment length."""
    if not items:
        return []
    pictures, tables = [], []
    for group in partition(items, _same_segments):
        models, about = by_model(group), _about(group[0])
        curves = {model: _curve(files, "by_position") for model, files in models.items()}
        pictures.append(Picture(_panels(curves, models), f"Loss by position on {about}. {_BANDS} Grey: others."))
        within = {model: _curve(files, "in_chunk") for model, files in models.items()}
        caption = "The same, averaged over all chunks except the first. Higher loss at the left is due to the border."
        pictures.append(Picture(_within(within), f"{caption} {_BANDS}"))
        tables.append(_border_table(about, group, material))
    intro = "Every segment is read from an empty state. Dotted lines: the tested borders between chunks."
    return [Section("Loss by position", intro, pictures, tables, published_statement("positions"))]


def _border_table(about: str, items: Sequence[Evaluated], material: Material) -> Table:
    """Return the table of border tests, with one column per model and its own chunk size."""
    grids = {
        (item.subject, item.norms): f"first {item.settings['first']} of {item.settings['chunk']}" for item in items
    }
    bare = [replace(item, scores=[{**score, "where": {}} for score in item.scores]) for item in items]
    return score_table(
        f"Loss after chunk borders, on {about}", collect(bare, material), PLAIN, heads=["score"],
        names=lambda place: (place.score,), about=lambda model: grids[model.subject, model.norms],
        notes=["The first tokens of each chunk (how many: under the model's name) are paired with the rest of the "
               "chunk. t and p are given per seed."],
    )  # fmt: skip


_BANDS = "Bands: ± 1 standard error (of the mean over seeds)."


def _same_segments(item: Evaluated) -> tuple[object, ...]:
    return item.texts, item.tokenizer, item.settings["length"], item.settings["segments"]


def _about(item: Evaluated) -> str:
    settings = item.settings
    return item.about(f"{settings['segments']:,} segments of {token_count(settings['length'])} tokens")


def _curve(files: Sequence[Evaluated], name: str) -> Curve:
    """Return means over seeds with their standard error; for one seed the standard error over segments."""
    seeds = [file.details[name] for file in files]
    curve = []
    for points in zip(*seeds, strict=False):
        means = [point["mean"] for point in points]
        own = math.nan if points[0]["standard_error"] is None else points[0]["standard_error"]
        error = own if len(means) == 1 else statistics.stdev(means) / math.sqrt(len(means))
        curve.append((points[0]["position"], statistics.fmean(means), error))
    return curve


def _panels(curves: Mapping[Model, Curve], models: Mapping[Model, Sequence[Evaluated]]) -> str:
    """Draw one panel per model with the same scales, and the other models in grey."""
    rows = len(curves)
    figure, panels = new_panels("position, tokens", "loss, nats per token", rows, height=1.2 + 1.7 * rows)
    for axes, (model, curve) in zip(panels, curves.items(), strict=True):
        settings = models[model][0].settings
        for border in chunk_borders(settings["length"], settings["chunk"]):
            axes.axvline(border, color=MIDDLE, linewidth=0.7, linestyle=":")
        for other in curves.values():
            if other is not curve:
                axes.plot(*_middles(other), color=LIGHT, linewidth=0.7)
        _draw_positions(axes, curve, model, marked=False)
        axes.set_title(f"{model.label}, a border every {settings['chunk']} tokens", fontsize=11, loc="left")
        axes.set_xlim(0, settings["length"])
        axes.set_ylim(*_frame(curves.values()))
    return svg(figure)


def _within(curves: Mapping[Model, Curve]) -> str:
    figure, axes = new_figure("position in the chunk, tokens", "loss, nats per token")
    for model, curve in curves.items():
        _draw_positions(axes, curve, model, marked=True)
    axes.set_xlim(left=0)
    label_line_ends(axes, [(curve[-1][1], model.style, model.label) for model, curve in curves.items()])
    return svg(figure)


def _draw_positions(axes: Any, curve: Curve, model: Model, *, marked: bool) -> None:
    x, mean = _middles(curve)
    low, high = ([y + sign * error for _, y, error in curve] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=model.style.color, alpha=0.25, linewidth=0)
    line = model.style.line(len(curve)) | {"linewidth": 1.4}
    axes.plot(x, mean, **(line if marked else line | {"marker": "", "linestyle": "-"}))


def _middles(curve: Curve) -> tuple[list[float], list[float]]:
    """Return the middles of the bins, and the means."""
    width = curve[1][0] - curve[0][0] if len(curve) > 1 else 1
    return [position + width / 2 for position, _, _ in curve], [mean for _, mean, _ in curve]


def _frame(curves: Any) -> tuple[float, float]:
    """Return the limits of the y axis, without the first twentieth of each curve, which has little context."""
    settled = [mean for curve in curves for _, mean, _ in curve[len(curve) // 20 :]]
    margin = 0.05 * (max(settled) - min(settled)) or 0.05
    return min(settled) - margin, max(settled) + margin
