"""Accuracy on synthetic tasks by the distance of the answer in chunks, with the level of guessing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gecko.pages.drawing import DARK, LineStyle, label_line_ends, new_figure, svg
from gecko.report.reading import Material
from gecko.report.scores import Evaluated, Model, Scores, collect, partition
from gecko.report.sections import Picture, Section
from gecko.report.seeds import error_bars, estimate
from gecko.report.tables import PERCENT, score_table

_GUESSING = LineStyle(DARK, (0, (2, 2)), "")
_DISTANCE = "chunks before the question"
_NAMES = {"mqar": "Associative recall (MQAR)", "selective_copying": "Selective copying",
          "induction_heads": "Induction heads"}  # fmt: skip


def synthetic_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    """A picture for each task, size and length of chunks: distances in other chunks are other distances."""
    if not items:
        return []
    pictures, tables = [], []
    for group in partition(items, _same_questions):
        settings, scores = group[0].settings, collect(group, material)
        size, chunk = settings["size"], settings["config"]["chunk_size"]
        about = (
            f"{_NAMES[settings['task']]}, {size['length']} tokens, {size['items']} to remember, chunks of {chunk}, "
            f"{settings['steps']:,} steps"
        )
        pictures.append(Picture(_curves(scores, settings["guessing"]), f"{about}. Bars: 95 %."))
        tables.append(score_table(
            about, scores, PERCENT, folded=True, heads=[_DISTANCE], names=lambda place: (f"{place[_DISTANCE]}",),
            notes=[f"Guessing gives {100 * settings['guessing']:.1f} %."],
        ))  # fmt: skip
    intro = (
        "Small models trained from scratch on one task. An answer that stands more chunks before its question than "
        "attention reaches must come from the memory or the moving average."
    )
    return [Section("Synthetic tasks", intro, pictures, tables)]


def _same_questions(item: Evaluated) -> tuple[object, ...]:
    settings = item.settings
    size = json.dumps(settings["size"], sort_keys=True)
    return settings["task"], size, settings["config"]["chunk_size"], settings["steps"], settings["guessing"]


def _curves(models: Mapping[Model, Scores], guessing: float) -> str:
    figure, axes = new_figure("chunks from the answer to its question", "right answers, %")
    ends = []
    for number, (model, scores) in enumerate(models.items()):
        # Bars of the same distance stand beside each other.
        aside = 0.05 * (number - (len(models) - 1) / 2)
        points = sorted((place[_DISTANCE], estimate(list(seeds.values()), PERCENT.limits))
                        for place, seeds in scores.items() if place[_DISTANCE] != "any")  # fmt: skip
        bars = [[100 * reach for reach in side] for side in error_bars(found for _, found in points)]
        axes.errorbar(
            [distance + aside for distance, _ in points], [100 * found.mean for _, found in points], yerr=bars,
            capsize=2.5, elinewidth=0.9, **(model.style.line(len(points)) | {"markevery": 1}),
        )  # fmt: skip
        ends.append((100 * points[-1][1].mean, model.style, model.label))
    axes.axhline(100 * guessing, color=DARK, linewidth=1, linestyle=_GUESSING.dashes)
    axes.set_ylim(-3, 103)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_line_ends(axes, [*ends, (100 * guessing, _GUESSING, "guessing")])
    return svg(figure)
