"""Tables of the academic tasks and of SCROLLS, each with the paper's own beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gecko.report.published import published_table
from gecko.report.reading import Material
from gecko.report.scores import Evaluated, collect
from gecko.report.sections import Section
from gecko.report.tables import OF_HUNDRED, PERCENT, Unit, score_table


def academic_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    return _section(
        "Academic tasks", "The tasks of the paper's Table 1, with its shots.", items, material,
        PERCENT, ("academic", "academic_1b"),
    )  # fmt: skip


def scrolls_sections(items: Sequence[Evaluated], material: Material) -> list[Section]:
    return _section(
        "Questions about long documents", "SCROLLS, asked and scored as in the paper's Table 2.", items, material,
        OF_HUNDRED, ("scrolls",),
    )  # fmt: skip


def _section(
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
    """Scores on other data stand in rows of their own."""
    data = _data(item.settings)
    return replace(item, scores=[{**score, "where": {**score["where"], "data": data}} for score in item.scores])


def _data(settings: Mapping[str, Any]) -> str:
    """What was read and how answers were asked for, as far as it may differ."""
    parts = [settings.get("data", "not recorded") or "hub"]
    if settings.get("limit") is not None:
        parts.append(f"first {settings['limit']:,}")
    if settings.get("shots_data") is not None:
        parts.append(f"shots of {settings['shots_data']}")
    if "new_tokens" in settings:
        parts.append(f"answers of {settings['new_tokens']:,} tokens")
    return ", ".join(parts)
