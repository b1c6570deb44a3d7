"""Sections on academic tasks, SCROLLS, retrieval by length and depth, and synthetic tasks by distance in chunks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gecko.experiments.report.material import Material
from gecko.experiments.report.models import Evaluated, Model, Scores, collect, partition
from gecko.experiments.report.perplexity import token_count
from gecko.experiments.report.tables import (
    OF_HUNDRED,
    PERCENT,
    Picture,
    Section,
    Unit,
    error_bars,
    estimate,
    published_statement,
    published_table,
    score_table,
)
from gecko.pages import DARK, MIDDLE, LineStyle, label_line_ends, new_figure, svg


def academic_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    return _task_section(
        "Academic tasks", "The tasks of the paper's Table 1, with its shots.", items, material,
        PERCENT, ("academic", "academic_1b"),
    )  # fmt: skip


def scrolls_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    return _task_section(
        "Questions about long documents", "SCROLLS, asked and scored as in the paper's Table 2.", items, material,
        OF_HUNDRED, ("scrolls",),
    )  # fmt: skip


def _task_section(
    title: str, intro: str, items: Sequence[Evaluated], material: Material, unit: Unit, tables: Sequence[str]
) -> list[Section]:
    if not items:
        return []
    notes = [note for item in items for note in item.file.record.get("notes", [])]
    scores = collect([_with_data(item) for item in items], material)
    measured = score_table(
        f"{title}: measured", scores, unit, heads=["task", "data", "metric"],
        names=lambda place: (place["task"], place["data"], place.score), notes=list(dict.fromkeys(notes)),
    )  # fmt: skip
    return [Section(title, intro, [], [measured, *(published_table(name) for name in tables)])]


def _with_data(item: Evaluated) -> Evaluated:
    """Add the data to the scores' places, so that scores on different data are in different rows."""
    data = _data(item.settings)
    return replace(item, scores=[{**score, "where": {**score["where"], "data": data}} for score in item.scores])


def _data(settings: Mapping[str, Any]) -> str:
    """Describe the data and the settings that may differ between evaluations of a task."""
    parts = [settings.get("data", "not recorded") or "hub"]
    if settings.get("limit") is not None:
        parts.append(f"first {settings['limit']:,}")
    if settings.get("shots_data") is not None:
        parts.append(f"shots of {settings['shots_data']}")
    if "new_tokens" in settings:
        parts.append(f"answers of {settings['new_tokens']:,} tokens")
    return ", ".join(parts)


_WIDTH = 4.2
_DRAWN = "string_match_all"
_RETRIEVAL_NAMES = {"passkey": "Passkey", "niah_single_1": "Needle in noise", "niah_single_2": "Needle in texts"}


def retrieval_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    """Return one section per task, with a map for each haystack and model."""
    return [_retrieval_section(group, material) for group in partition(items, lambda item: item.settings["task"])]


def _retrieval_section(items: Sequence[Evaluated], material: Material) -> Section:
    task, maps, tables = items[0].settings["task"], [], []
    for group in partition(items, _same_haystack):
        scores, on = collect(group, material), f", in {group[0].named_texts}" if group[0].texts else ""
        maps += [Picture(_map(found), f"{model.label}{on}", small=True) for model, found in scores.items()]
        tables.append(score_table(
            f"{_RETRIEVAL_NAMES[task]} ({task}){on}", scores, PERCENT, folded=True, heads=["length", "depth", "score"],
            names=lambda place: (token_count(place["length"]), depth_name(place["depth"]), place.score),
        ))  # fmt: skip
    intro = (
        "Percentage of samples whose answer contains the hidden number, by length of the text and depth of the needle; "
        "mean over seeds. Lengths are in tokens of each model's tokenizer."
    )
    title = f"Retrieval: {_RETRIEVAL_NAMES[task].lower()}"
    return Section(title, intro, maps, tables, published_statement("retrieval"))


def _same_haystack(item: Evaluated) -> tuple[object, ...]:
    """Return the key of evaluations in one table. Depths may differ: each is a row."""
    return item.texts, item.details.get("words")


def depth_name(depth: float | str) -> str:
    return "random" if depth == "random" else f"{100 * float(depth):.3g} %"


def _map(scores: Scores) -> str:
    """Draw a map of the scores: length to the right, depth downwards, and a number in every measured cell."""
    shares = {(place["length"], place["depth"]): estimate(list(seeds.values())).mean
              for place, seeds in scores.items() if place.score == _DRAWN}  # fmt: skip
    lengths, depths = sorted({length for length, _ in shares}), sorted({depth for _, depth in shares}, key=_depth_order)
    figure, axes = new_figure("length, tokens", "depth of the needle", height=1.3 + 0.5 * len(depths), width=_WIDTH)
    table = [[shares.get((length, depth), math.nan) for length in lengths] for depth in depths]
    axes.pcolormesh(table, cmap="Blues", vmin=0, vmax=1, edgecolors=MIDDLE, linewidth=0.5)
    for row, values in enumerate(table):
        for column, share in enumerate(values):
            dark = share > 0.55
            text = "–" if math.isnan(share) else f"{100 * share:.0f}"
            axes.text(column + 0.5, row + 0.5, text, color="white" if dark else DARK, ha="center", va="center",
                      fontsize=12)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xticks([place + 0.5 for place in range(len(lengths))], [token_count(length) for length in lengths])
    axes.set_yticks([place + 0.5 for place in range(len(depths))], [depth_name(depth) for depth in depths])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return svg(figure)


def _depth_order(depth: float | str) -> float:
    """Return the sort key of a depth; random depths are last."""
    return 2.0 if isinstance(depth, str) else depth


_GUESSING = LineStyle(DARK, (0, (2, 2)), "")
_DISTANCE = "chunks before the question"
_SYNTHETIC_NAMES = {"mqar": "Associative recall (MQAR)", "selective_copying": "Selective copying",
          "induction_heads": "Induction heads"}  # fmt: skip


def synthetic_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    """Return the section with one picture per task, size and chunk size, in which distances can be compared."""
    if not items:
        return []
    pictures, tables = [], []
    for group in partition(items, _same_questions):
        settings, scores = group[0].settings, collect(group, material)
        size, chunk = settings["size"], settings["config"]["chunk_size"]
        about = (
            f"{_SYNTHETIC_NAMES[settings['task']]}, {size['length']} tokens, {size['items']} to remember, "
            f"chunks of {chunk}, {settings['steps']:,} steps"
        )
        pictures.append(Picture(_curves(scores, settings["guessing"]), f"{about}. Bars: 95 %."))
        tables.append(score_table(
            about, scores, PERCENT, folded=True, heads=[_DISTANCE], names=lambda place: (f"{place[_DISTANCE]}",),
            notes=[f"Guessing gives {100 * settings['guessing']:.1f} %."],
        ))  # fmt: skip
    intro = (
        "Small models trained from scratch on one task. If an answer is more chunks before its question than attention "
        "reaches, it must come from the memory or from CEMA."
    )
    return [Section("Synthetic tasks", intro, pictures, tables)]


def _same_questions(item: Evaluated) -> tuple[object, ...]:
    settings = item.settings
    size = json.dumps(settings["size"], sort_keys=True)
    return settings["task"], size, settings["config"]["chunk_size"], settings["steps"], settings["guessing"]


def _curves(models: Mapping[Model, Scores], guessing: float) -> str:
    figure, axes = new_figure("chunks from the answer to its question", "accuracy, %")
    ends = []
    for number, (model, scores) in enumerate(models.items()):
        # Bars at the same distance are drawn side by side.
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
