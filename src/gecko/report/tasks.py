"""Tables of the academic tasks and of SCROLLS, each with the paper's own beside it."""

from __future__ import annotations

from collections.abc import Sequence

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
    measured = score_table(
        f"{title}: measured", collect(items, material), unit, heads=["task", "metric"],
        names=lambda place: (place["task"], place.score), notes=list(dict.fromkeys(notes)),
    )  # fmt: skip
    return [Section(title, intro, [], [measured, *(published_table(name) for name in tables)])]
