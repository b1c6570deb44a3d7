"""Tables of the page: one column a model, every number with n and interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gecko.eval.results import readable
from gecko.report.scores import Model, Place, Scores
from gecko.report.seeds import NOT_AVERAGED, Estimate, estimate


@dataclass(frozen=True)
class Cell:
    value: str
    detail: str = ""
    """Interval and n, in small print."""


@dataclass(frozen=True)
class Table:
    """Columns are (name, small print under it); ``heads`` of them name the row."""

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]
    heads: int = 1
    notes: Sequence[str] = field(default_factory=list)
    published: bool = False
    folded: bool = False
    """Shown on a click: all the numbers of a picture."""


@dataclass(frozen=True)
class Unit:
    """How values are written."""

    text: Callable[[float], str]
    name: str
    limits: tuple[float, float] | None = None
    """The values of 0 and 100 %, of shares."""


PLAIN = Unit(readable, "")
PERCENT = Unit(lambda share: f"{100 * share:.1f}", "%", (0, 1))
"""Of shares in 0..1."""
OF_HUNDRED = Unit(lambda score: f"{score:.1f}", "%", (0, 100))
"""Of scores that are in percent already."""


def score_table(
    title: str, scores: Mapping[Model, Scores], unit: Unit, *, folded: bool = False,
    names: Callable[[Place], Sequence[str]], heads: Sequence[str], notes: Iterable[str] = (),
    about: Callable[[Model], str] = lambda _: "",
) -> Table:  # fmt: skip
    """All scores of models, one a row; ``names`` of a score's place are the cells under ``heads``.

    ``about`` adds to the small print under a model's name.
    """
    places = list(dict.fromkeys(place for of_model in scores.values() for place in of_model))
    rows = []
    methods: dict[str, None] = {}
    for place in places:
        cells = [Cell(name) for name in names(place)]
        for of_model in scores.values():
            by_seed = of_model.get(place)
            found = None if by_seed is None else estimate(list(by_seed.values()), unit.limits)
            if found is not None and found.interval is not None:
                methods.setdefault(found.interval.method)
            cells.append(Cell("") if found is None else _cell(found, place.score, unit))
        rows.append(cells)
    columns = [
        *((head, "") for head in heads),
        *((model.label, f"{model.detail()} {about(model)}".strip()) for model in scores),
    ]
    small = f"Values in {unit.name}. " if unit.name else ""
    said = [f"{small}Below each value its 95 % interval and n. Intervals: {'; '.join(methods) or 'none'}."]
    return Table(title, columns, rows, len(heads), [*said, *notes], folded=folded)


def _cell(found: Estimate, score: str, unit: Unit) -> Cell:
    if score in NOT_AVERAGED:
        return Cell("; ".join(unit.text(value) for value in found.values), f"n {found.n}")
    each = " for each seed" if len(found.values) > 1 else ""
    return Cell(unit.text(found.mean), f"{span(found.interval, unit)}; n {found.n}{each}")


def span(interval: Any, unit: Unit) -> str:
    """An interval in words."""
    return "no interval" if interval is None else f"{unit.text(interval.low)} to {unit.text(interval.high)}"
