"""Results as one long table, a row for each number of a model, seed and case; means over seeds, tables of scores."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from gecko.eval.results import Interval, over_seeds, readable
from gecko.pages import Cell, LineStyle, Table

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Model:
    """A model with all its seeds: a column of tables and a line of pictures."""

    label: str
    style: LineStyle
    differences: str = ""
    """Settings that differ from other models of the same recipe."""


class Row(NamedTuple):
    """One number."""

    model: Model
    seed: int | None
    """Training seed; None if unknown."""
    evaluation: str
    text: tuple[Any, ...]
    """What must be equal for values to be compared, such as texts and tokenizer; first the words for it."""
    case: Mapping[str, Any]
    """Case of the evaluation, such as ``{"context": 1024}``."""
    score: str
    value: float
    interval: Interval | None
    n: int
    """Sample size, in units."""
    unit: str
    file: Any
    """Record of the file that the number is from."""

    @property
    def place(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Score and case, which are the same for all models and seeds."""
        return self.score, tuple(self.case.items())


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by key, in order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_model(rows: Iterable[Row]) -> dict[Model, list[Row]]:
    return grouped(rows, lambda row: row.model)


class Unit(NamedTuple):
    """Unit and number format of values."""

    shown: Callable[[float], str]
    name: str
    limits: tuple[float, float] | None = None
    """Values of 0 and 100 %, for proportions."""


PLAIN = Unit(readable, "")
PERCENT = Unit(lambda share: f"{100 * share:.1f}", "%", (0, 1))
"""Unit of proportions in 0..1."""
OF_HUNDRED = Unit(lambda score: f"{score:.1f}", "%", (0, 100))
"""Unit of scores that are already in percent."""


def estimate(seeds: Sequence[Row], limits: tuple[float, float] | None = None) -> tuple[float, Interval | None]:
    """Return the mean of a score over its seeds, and its interval.

    With one seed the interval is the evaluation's own; with several it is that of the mean over seeds, cut at the
    ``limits``, which Student's symmetric interval can exceed. If all seeds have the same value, the spread between
    seeds is unknown and the interval spans those of the evaluations.
    """
    values, own = [row.value for row in seeds], [row.interval for row in seeds if row.interval is not None]
    interval = own[0] if own else None
    if len(set(values)) > 1:
        interval = over_seeds(values)
        if interval is not None and limits is not None:
            low, high = max(limits[0], interval.low), min(limits[1], interval.high)
            interval = Interval(low, high, f"{interval.method}, cut at 0 and 100 %")
    elif len(values) > 1 and own:
        method = f"equal for all seeds: widest of each seed's ({own[0].method})"
        interval = Interval(min(one.low for one in own), max(one.high for one in own), method)
    return fmean(values), interval


def span(interval: Interval | None, shown: Callable[[float], str] = readable) -> str:
    """Format an interval."""
    return "no interval" if interval is None else f"{shown(interval.low)} to {shown(interval.high)}"


def methods(intervals: Iterable[Interval | None]) -> str:
    """Return the names of the intervals' methods, each once."""
    return "; ".join(dict.fromkeys(one.method for one in intervals if one is not None)) or "none"


NOT_AVERAGED = ("t", "p, two-sided")
"""Scores that are not averaged over seeds; the score of each seed is shown."""


def score_table(
    title: str, rows: Sequence[Row], heads: Mapping[str, Callable[[Row], str]], unit: Unit = PLAIN, *,
    notes: Iterable[str] = (), folded: bool = False, about: Callable[[Row], str] = lambda _: "",
) -> Table:  # fmt: skip
    """Return a table with one column per model and one line per score and case.

    Args:
        heads: names of the first columns, with the text of each.
        about: function that returns further small print under a model's name.
    """
    models, lines, intervals = by_model(rows), [], []

    def cell(seeds: Sequence[Row]) -> Cell:
        n = counts(seeds)
        if seeds[0].score in NOT_AVERAGED:
            return "; ".join(unit.shown(row.value) for row in seeds), f"n {n}"
        mean, interval = estimate(seeds, unit.limits)
        intervals.append(interval)
        return unit.shown(mean), f"{span(interval, unit.shown)}; n {n}{' for each seed' if len(seeds) > 1 else ''}"

    def detail(mine: Sequence[Row]) -> str:
        known = [str(seed) for seed in dict.fromkeys(row.seed for row in mine) if seed is not None]
        words = f"{'seed' if len(known) == 1 else 'seeds'} {', '.join(known)}" if known else "seed not known"
        sizes = [row.file.record["model"]["parameters"] for row in mine if "parameters" in row.file.record["model"]]
        return f"{words}; {sizes[0]:,} parameters" if sizes else words

    for of_place in grouped(rows, lambda row: row.place).values():
        found = by_model(of_place)
        cells = [cell(found[model]) if model in found else "" for model in models]
        lines.append([*(text(of_place[0]) for text in heads.values()), *cells])
    columns = [(model.label, f"{detail(mine)} {about(mine[-1])}".strip()) for model, mine in models.items()]
    small = f"Values in {unit.name}. " if unit.name else ""
    legend = f"{small}Below each value its 95 % interval and n. Intervals: {methods(intervals)}."
    return Table(title, [*heads, *columns], lines, [legend, *notes], len(heads), folded)


def counts(rows: Sequence[Row]) -> str:
    """Return the sample size of each seed as text."""
    found = sorted({row.n for row in rows})
    return " to ".join(dict.fromkeys(f"{n:,}" for n in (found[0], found[-1]))) + f" {rows[0].unit}"
