"""What `gecko compare` found: losses paired by seed with those of its first recipe, and how rates were tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gecko.eval.intervals import Interval
from gecko.eval.results import readable
from gecko.report.sections import Section
from gecko.report.tables import PLAIN, Cell, Table, span


def comparison_sections(comparisons: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[Section]:
    tables = [table for folder, record in comparisons for table in (_losses(folder, record), _tuning(folder, record))]
    if not tables:
        return []
    intro = "Models trained on the same texts in the same order, with the same optimizer."
    return [Section("Comparison", intro, [], [table for table in tables if table is not None])]


def _losses(folder: Path, record: Mapping[str, Any]) -> Table:
    first = record["first"]
    columns = [("model", ""), ("parameters", ""), ("seeds", ""), (record["unit"], ""), (f"minus {first}", "paired"),
               ("n", "of each seed")]  # fmt: skip
    methods: dict[str, None] = {}
    rows = []
    for one in record["recipes"]:
        of = _interval(one["interval"], methods)
        difference = Cell("–")
        if one["difference"] is not None:
            difference = Cell(f"{one['difference']:+.4f}", _signed(_interval(one["difference_interval"], methods)))
        counts = {f"{run['held_out_tokens']:,} tokens" for run in record["runs"] if run["recipe"] == one["recipe"]}
        rows.append([
            Cell(one["recipe"]), Cell(f"{one['parameters']:,}"), Cell(", ".join(map(str, one["seeds"]))),
            Cell(readable(one["nats_per_byte"]), span(of, PLAIN)), difference, Cell(" or ".join(sorted(counts))),
        ])  # fmt: skip
    notes = [f"Intervals: {'; '.join(methods) or 'none'}.", *record["notes"]]
    notes += [f"Not finished: {run} ({state})." for run, state in record["unfinished"].items()]
    return Table(f"Losses of {folder.name}, compared", columns, rows, 1, notes)


def _tuning(folder: Path, record: Mapping[str, Any]) -> Table | None:
    tuning = record["tuning"]
    if tuning is None:
        return None
    rates, chosen = tuning["learning_rates"], tuning["chosen"]
    trials = {(trial["recipe"], trial["learning_rate"]): trial for trial in tuning["trials"]}
    names = list(dict.fromkeys(trial["recipe"] for trial in tuning["trials"]))
    rows = [[Cell(name), *(_trial(trials.get((name, rate)), chosen.get(name) == rate) for rate in rates)]
            for name in names]  # fmt: skip
    counts = sorted({f"{trial['tokens']:,}" for trial in tuning["trials"] if trial.get("tokens")})
    note = (
        f"{record['unit'].capitalize()} after {tuning['steps']:,} steps, one seed, over {' or '.join(counts) or 'no'} "
        "tokens; no intervals."
    )
    return Table(f"Learning rates of {folder.name}", [("model", ""), *((f"{rate:g}", "") for rate in rates)], rows, 1,
                 [note])  # fmt: skip


def _trial(trial: Mapping[str, Any] | None, chosen: bool) -> Cell:
    if trial is None:
        return Cell("")
    value = trial["nats_per_byte"]
    return Cell(trial["state"] if value is None else readable(value), "taken" if chosen else "")


def _interval(found: Mapping[str, Any] | None, methods: dict[str, None]) -> Interval | None:
    if found is None:
        return None
    methods.setdefault(found["method"])
    return Interval(**found)


def _signed(interval: Interval | None) -> str:
    return "no interval" if interval is None else f"{interval.low:+.4f} to {interval.high:+.4f}"
