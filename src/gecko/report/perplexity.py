"""Perplexity against context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gecko.pages.drawing import label_line_ends, new_figure, svg
from gecko.report.published import published_statement
from gecko.report.reading import Material
from gecko.report.scores import Evaluated, Model, Scores, collect, partition
from gecko.report.sections import Picture, Section
from gecko.report.seeds import error_bars, estimate
from gecko.report.tables import PLAIN, score_table

_DRAWN = "perplexity, token"
_TALLEST = 1.5
"""The picture ends at so many times the worst model's best: what explodes beyond its window must not flatten all."""

_MARKS = "Thin: each seed; bars, of one seed: 95 %. What leaves the frame at its top is in the table."


def perplexity_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    """A picture for each text and tokenizer: perplexities of other tokens say nothing of each other."""
    if not items:
        return []
    pictures, tables = [], []
    for group in partition(items, _same_tokens):
        scores = collect(group, material)
        texts = group[0].about(f"{group[0].scores[0]['n']:,} tokens")
        pictures.append(Picture(_curves(scores), f"Perplexity of a token by context, on {texts}. {_MARKS}"))
        tables.append(score_table(
            f"Perplexity on {texts}", scores, PLAIN, folded=True, heads=["context", "score"],
            names=lambda place: (f"{place['context']:,}", place.score),
        ))  # fmt: skip
    intro = (
        "The same tokens scored at every context length, each segment from a fresh state. The paired changes in the "
        "table, block by block, show best whether a longer context helps."
    )
    if len(pictures) > 1:
        intro += " Other texts, or the same in other tokens, are drawn apart; bits a byte compare between tokenizers."
    return [Section("Perplexity by context length", intro, pictures, tables, published_statement("perplexity"))]


def _same_tokens(item: Evaluated) -> tuple[object, ...]:
    return item.texts, item.tokenizer, item.details.get("bytes"), item.scores[0]["n"]


def _curves(models: Mapping[Model, Scores]) -> str:
    figure, axes = new_figure("context length, tokens", "perplexity of a token")
    ends, lowest, highest = [], [], 0.0
    for model, scores in models.items():
        by_context = {place["context"]: seeds for place, seeds in scores.items() if place.score == _DRAWN}
        means = _draw(axes, model, dict(sorted(by_context.items())))
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


def _draw(axes: Any, model: Model, places: Mapping[int, Mapping[Any, Mapping[str, Any]]]) -> list[float]:
    """Scores by context and seed: the means, which are returned, and how sure they are."""
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
    """``16K``, ``4M``, as commands take them."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"
