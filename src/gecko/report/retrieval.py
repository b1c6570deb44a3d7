"""Retrieval of a number from long texts: grids of length and depth."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gecko.pages.drawing import DARK, MIDDLE, new_figure, svg
from gecko.report.perplexity import token_count
from gecko.report.published import published_statement
from gecko.report.reading import Material
from gecko.report.scores import Evaluated, Scores, collect, partition
from gecko.report.sections import Picture, Section
from gecko.report.seeds import estimate
from gecko.report.tables import PERCENT, score_table

_WIDTH = 4.2
_DRAWN = "string_match_all"
_NAMES = {"passkey": "Passkey", "niah_single_1": "Needle in noise", "niah_single_2": "Needle in texts"}


def retrieval_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    """One for each task, with a map for each haystack and model."""
    return [_section(group, material) for group in partition(items, lambda item: item.settings["task"])]


def _section(items: Sequence[Evaluated], material: Material) -> Section:
    task, maps, tables = items[0].settings["task"], [], []
    for group in partition(items, _same_haystack):
        scores, on = collect(group, material), f", in {group[0].named_texts}" if group[0].texts else ""
        maps += [Picture(_map(found), f"{model.label}{on}", small=True) for model, found in scores.items()]
        tables.append(score_table(
            f"{_NAMES[task]} ({task}){on}", scores, PERCENT, folded=True, heads=["length", "depth", "score"],
            names=lambda place: (token_count(place["length"]), depth_name(place["depth"]), place.score),
        ))  # fmt: skip
    intro = (
        "Share of samples, in %, in which the hidden number was written, by length of the text and by how much of it "
        "stands before the needle; over seeds, the mean. Lengths are in tokens of each model's own tokenizer."
    )
    return Section(f"Retrieval: {_NAMES[task].lower()}", intro, maps, tables, published_statement("retrieval"))


def _same_haystack(item: Evaluated) -> tuple[object, ...]:
    """Depths need not be the same: each is a row of its own."""
    return item.texts, item.details.get("words")


def depth_name(depth: float | str) -> str:
    return "random" if depth == "random" else f"{100 * float(depth):.3g} %"


def _map(scores: Scores) -> str:
    """Length to the right, depth downwards as in the text; a number in every cell that was measured."""
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
    """Those drawn at random stand last."""
    return 2.0 if isinstance(depth, str) else depth
