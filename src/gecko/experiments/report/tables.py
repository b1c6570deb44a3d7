"""Parts of a report's page: estimates over seeds, tables, sections, and the paper's published numbers.

Published numbers are transcribed from the paper. They are for its own models, data and scale.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from gecko.eval.results import Interval, over_seeds, readable
from gecko.experiments.report.models import Model, Place, Scores

NOT_AVERAGED = ("t", "p, two-sided")
"""Scores that are not averaged over seeds; the score of each seed is shown."""


@dataclass(frozen=True)
class Estimate:
    """Values of all seeds, their mean with its interval, and the sample size of each value."""

    values: tuple[float, ...]
    mean: float
    interval: Interval | None
    n: str


def estimate(scores: Sequence[Mapping[str, Any]], limits: tuple[float, float] | None = None) -> Estimate:
    """Estimate a score from the records of its seeds.

    With one seed the interval is the evaluation's own; with several it is that of the mean over seeds. If all seeds
    have the same value, the spread between seeds is unknown and the interval spans those of the evaluations.

    Args:
        scores: records of the same score, one per seed.
        limits: values of 0 and 100 %, for scores that are proportions.
    """
    values = tuple(float(score["value"]) for score in scores)
    own = [Interval(**score["interval"]) for score in scores if score["interval"] is not None]
    interval = (own[0] if own else None) if len(values) == 1 else _over_seeds(values, own, limits)
    return Estimate(values, statistics.fmean(values), interval, _count(scores))


def error_bars(estimates: Iterable[Estimate]) -> list[list[float]]:
    """Return the distances of the intervals' ends below and above the means; 0 without an interval."""
    below, above = [], []
    for found in estimates:
        low, high = (found.mean, found.mean) if found.interval is None else (found.interval.low, found.interval.high)
        below.append(max(0.0, found.mean - low))
        above.append(max(0.0, high - found.mean))
    return [below, above]


def _over_seeds(
    values: Sequence[float], own: Sequence[Interval], limits: tuple[float, float] | None
) -> Interval | None:  # fmt: skip
    if len(set(values)) > 1:
        return _cut(over_seeds(values), limits)
    if not own:
        return None
    return Interval(min(one.low for one in own), max(one.high for one in own),
                    f"equal for all seeds: widest of each seed's ({own[0].method})")  # fmt: skip


def _cut(interval: Interval | None, limits: tuple[float, float] | None) -> Interval | None:
    """Cut an interval at 0 and 100 %, which Student's symmetric interval can exceed."""
    if interval is None or limits is None:
        return interval
    low, high = max(limits[0], interval.low), min(limits[1], interval.high)
    return Interval(low, high, f"{interval.method}, cut at 0 and 100 %")


def _count(scores: Sequence[Mapping[str, Any]]) -> str:
    counts = sorted({int(score["n"]) for score in scores})
    number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{number} {scores[0]['unit']}"


@dataclass(frozen=True)
class Cell:
    """Cell of a table."""

    value: str
    detail: str = ""
    """Interval and n, shown in small print."""


@dataclass(frozen=True)
class Table:
    """A table. Columns are (name, small print); the first ``heads`` columns name the row."""

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]
    heads: int = 1
    notes: Sequence[str] = field(default_factory=list)
    published: bool = False
    folded: bool = False
    """Whether the table is collapsed; used for the numbers of a picture."""


@dataclass(frozen=True)
class Unit:
    """Unit and number format of values."""

    text: Callable[[float], str]
    name: str
    limits: tuple[float, float] | None = None
    """Values of 0 and 100 %, for proportions."""


PLAIN = Unit(readable, "")
PERCENT = Unit(lambda share: f"{100 * share:.1f}", "%", (0, 1))
"""Unit of proportions in 0..1."""
OF_HUNDRED = Unit(lambda score: f"{score:.1f}", "%", (0, 100))
"""Unit of scores that are already in percent."""


def score_table(
    title: str, scores: Mapping[Model, Scores], unit: Unit, *, folded: bool = False,
    names: Callable[[Place], Sequence[str]], heads: Sequence[str], notes: Iterable[str] = (),
    about: Callable[[Model], str] = lambda _: "",
) -> Table:  # fmt: skip
    """Return a table with one column per model and one row per score.

    Args:
        names: function that returns the cells under ``heads`` for a score's place.
        about: function that returns further small print under a model's name.
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
    legend = [f"{small}Below each value its 95 % interval and n. Intervals: {'; '.join(methods) or 'none'}."]
    return Table(title, columns, rows, len(heads), [*legend, *notes], folded=folded)


def _cell(found: Estimate, score: str, unit: Unit) -> Cell:
    if score in NOT_AVERAGED:
        return Cell("; ".join(unit.text(value) for value in found.values), f"n {found.n}")
    each = " for each seed" if len(found.values) > 1 else ""
    return Cell(unit.text(found.mean), f"{span(found.interval, unit)}; n {found.n}{each}")


def span(interval: Any, unit: Unit) -> str:
    """Format an interval."""
    return "no interval" if interval is None else f"{unit.text(interval.low)} to {unit.text(interval.high)}"


@dataclass(frozen=True)
class Picture:
    """Figure with its caption."""

    svg: str
    caption: str
    small: bool = False
    """Whether several such pictures are placed side by side if the page is wide enough."""


@dataclass(frozen=True)
class Statement:
    """Statement of the paper without a table."""

    source: str
    text: str


@dataclass(frozen=True)
class Section:
    """Section of the page about one kind of measurement."""

    title: str
    intro: str
    pictures: Sequence[Picture] = field(default_factory=list)
    tables: Sequence[Table] = field(default_factory=list)
    statement: Statement | None = None


TABLES = ("training_loss", "academic", "academic_1b", "scrolls")


def published(name: str) -> dict[str, Any]:
    """Return the content of a file of published numbers: one of ``TABLES``, or ``statements``."""
    file = resources.files("gecko.experiments.report") / "published" / f"{name}.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def published_table(name: str) -> Table:
    """Return one of ``TABLES`` as a table that is marked as published."""
    content = published(name)
    columns = [("model", ""), *((fact, "") for fact in content["facts"])]
    for column in content["columns"]:
        columns.append((column["name"], "" if column["shots"] is None else f"{column['shots']} shots"))
    rows = [
        [Cell(row["model"]), *(Cell(fact or "not given") for fact in row["facts"]),
         *(Cell("" if value is None else _number(value, content["unit"])) for value in row["values"])]
        for row in content["rows"]
    ]  # fmt: skip
    notes = [f"In {content['unit']}: {content['metric']}.", *content["notes"]]
    return Table(f"{content['title']}: {content['source']} of the paper", columns, rows, 1, notes, published=True)


def published_statement(kind: str) -> Statement:
    return Statement(**published("statements")[kind])


def _number(value: float, unit: str) -> str:
    return f"{value:.1f}" if unit == "%" else f"{value:.2f}"
