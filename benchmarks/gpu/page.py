"""The results in Markdown, and the targets on an H200-class card."""

from __future__ import annotations

import csv
import lzma
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu.decoding import CAPTURED
from gpu.operators import AVERAGE, FACTOR, GECKO, MIXING, ROUNDING, TIMESTEP
from gpu.record import Record, Row
from gpu.training import CAPTURED_STEP, LLAMA
from gpu.variants import AHEAD, won

PREDICTIONS = Path(__file__).parents[1] / "results" / "gpu_budget.csv.xz"
"""Predictions of ``gpu_budget.py`` for each kernel of the steps."""


class Column(NamedTuple):
    """A column of a table. A head that ends with a colon is that of numbers; ``key`` names the value in a row."""

    head: str
    key: str
    form: str = ""
    unit: float | str = 1.0
    """The divisor of the number, or the name of a rate of the GPU, of which the cell shows the share."""

    def cell(self, row: Row, rates: Row) -> str:
        """Return the cell: a text, a number, or the numbers of forward and with backward. Unknown numbers give ""."""
        unit = rates.get(self.unit, math.nan) if isinstance(self.unit, str) else self.unit
        found = row.get(self.key)
        if found is None or isinstance(found, str):
            return (found or "").replace("|", "/")
        numbers = [x if unit == 1 else x / unit for x in (found if isinstance(found, Sequence) else [found])]
        return " / ".join(f"{x:{self.form}}" for x in numbers if not math.isnan(x))


class Table(NamedTuple):
    title: str
    columns: Sequence[Column]
    text: str = ""

    def lines(self, rows: Iterable[Row], rates: Row) -> list[str]:
        """Return a section; nothing if it has no rows."""
        cells = [[column.cell(row, rates) for column in self.columns] for row in rows]
        heads = [column.head.removesuffix(":") for column in self.columns]
        rule = ("---:" if column.head.endswith(":") else "---" for column in self.columns)
        text = [self.text, ""] if self.text else []
        table = [f"| {' | '.join(heads)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in cells)]
        return [f"## {self.title}", "", *text, *table, ""] if cells else []


OUTCOMES = ("passed", "failed", "skipped")
_DIFFERENCES = Column("difference:", "difference", ".1e"), Column("of the eager form:", "eager", ".1e")
TABLES = {
    "targets": Table("Targets", [
        Column("what", "what"), Column("target:", "target"), Column("measured:", "measured"), Column("", "verdict"),
    ]),
    "operators": Table("Operators", [
        Column("operator", "operator"), Column("form", "form"), Column("shape", "shape"),
        Column("card, ms:", "seconds", ".3f", 1e-3), Column("host, ms:", "launching", ".3f", 1e-3), Column("", "host"),
        *_DIFFERENCES, Column("", "verdict"),
        Column("MB:", "bytes", ",.1f", 1e6), Column("GFLOP:", "flops", ",.1f", 1e9),
        Column("copy bandwidth:", "bandwidth", ".1%", "copy"), Column("matrix rate:", "rate", ".1%", "products"),
    ], "Forward, and forward with backward. Host: until it has launched all kernels, and host-bound where that takes "
       "longer than the card's work. Difference: ‖y − exact‖ / ‖exact‖ of outputs and of gradients, the largest of "
       "each, from the eager form in float64; beside it, that of the eager form in bfloat16. More than "
       f"{FACTOR:g} times as much, and than {ROUNDING:.1g}, is WRONG. MB: each input and output once, with gradients "
       "in backward. GFLOP: those of the equations, two for a product and an addition, three times as many with "
       "backward. Shares are of the copy and the product above."),
    "training": Table("Training", [
        Column("model", "model"), Column("form", "form"), Column("parameters, M:", "parameters", ",.1f", 1e6),
        Column("rows:", "rows"), Column("tokens a row:", "length", ","), Column("recomputed", "recomputed"),
        Column("tokens/s:", "speed", ",.0f"), Column("MFU:", "flops", ".1%", "peak"),
        Column("of the measured matrix rate:", "flops", ".1%", "products"), Column("peak, GB:", "memory", ".1f", 1e9),
    ]),
    "decoding": Table("Decoding rows side by side", [
        Column("model", "model"), Column("rows:", "rows"), Column("form", "form"),
        Column("ms a step:", "seconds", ".3f", 1e-3),
        Column("of which the host launches, ms:", "launching", ".3f", 1e-3),
        Column("tokens/s:", "speed", ",.0f"), Column("GB:", "bytes", ".2f", 1e9),
        Column("of the byte limit:", "bandwidth", ".0%", "copy"),
    ], "Byte limit: weights, and what a token reads and writes of the states, over the bandwidth of the copy."),
    "variants": Table("Variants of kernels", [
        Column("operator", "operator"), Column("family", "family"), Column("variant", "form"),
        Column("ms:", "seconds", ".3f", 1e-3), Column("of today's with backward:", "share", ".0%"), *_DIFFERENCES,
        Column("", "verdict"),
    ], "Times and differences as above. A variant wins that is not WRONG and takes "
       f"{1 - AHEAD:.0%} less time than the chosen form, the fastest one of its family."),
    "other": Table("Other numbers", [Column("what", "what"), Column(":", "value", ",.6g"), Column("", "unit")]),
    "kernels": Table("Kernels of a training step: {}, one block and the head", [
        Column("kernel", "kernel"), Column("launches:", "launches"), Column("measured, µs:", "seconds", ",.1f", 1e-6),
        Column("of the step:", "part", ".1%"), Column("predicted, µs:", "predicted", ",.1f", 1e-6),
        Column("MB:", "bytes", ",.1f", 1e6), Column("GFLOP:", "flops", ",.1f", 1e9),
        Column("limit, µs:", "limit", ",.1f", 1e-6), Column("share:", "share", ".1%"),
    ], "Forward and backward, each kernel timed alone. Bytes of its tensors and FLOPs of its products, and the time "
       "predicted for an H200, are those of `gpu_budget.py`. Limit: the longer of bytes over the copy and FLOPs over "
       "the product above; share: the limit over the measured time. For PyTorch's operations, bytes are those of "
       "whole tensors, also where an operation is a view or touches a part, so a share can exceed 100 %."),
    "tests": Table("Tests", [
        Column("file of `tests/gpu`", "file"), *(Column(f"{name}:", name) for name in OUTCOMES),
        Column("failures", "failures"),
    ]),
    "items": Table("Items", [
        Column("item", "item"), Column("seconds:", "seconds", ",.1f"), Column("kernels compiled:", "compiled"),
        Column("", "ended"),
    ], "Kernels that were compiled meanwhile make an item's first call slow."),
}  # fmt: skip


def page(record: Record) -> list[str]:
    """Return all tables of one card."""
    *_, facts = record.rows("facts")
    rates = next(iter(record.rows("rates")), dict.fromkeys(("copy", "products", "peak"), math.nan))
    rows = {name: record.rows(name) for name in TABLES}
    rows |= {"targets": list(targets(rows, rates)), "variants": _variants(rows["variants"])}
    rows["tests"] = list(_tests(rows["tests"]))
    lines = []
    for name, table in TABLES.items():
        # Kernels have a table for each step.
        for step in dict.fromkeys(x.get("step", "") for x in rows[name]):
            found = [x for x in rows[name] if x.get("step", "") == step]
            titled = table._replace(title=table.title.format(step))
            lines += titled.lines(_kernels(found, rates) if step else found, rates)
    wrong = [f"{x['operator']} ({x['form']})" for x in (*rows["operators"], *rows["variants"]) if x.get("wrong")]
    warning = f"**Not what the eager form computes: {', '.join(wrong)}. Their times mean nothing.**"
    commands = dict.fromkeys(f"`{x['command']}`" for x in record.rows("facts"))
    return [
        f"# {facts['hardware'].partition(';')[0]}", "", f"{facts['hardware']}.", "",
        f"bfloat16, medians of {facts['repeats']} calls after {facts['warm_ups']}, fewer where calls are long; on a "
        "GPU, operators without the time that the host takes to launch them. A large copy moves "
        f"{rates['copy'] / 1e9:,.0f} GB/s, and a large product makes {rates['products'] / 1e12:,.2f} TFLOP/s; the peak "
        f"that MFU is counted by is {rates['peak'] / 1e12:,.2f}.", "",
        *([warning, ""] if wrong else []), *lines, f"Written by {', '.join(commands)}.",
    ]  # fmt: skip


def _variants(rows: list[Row]) -> list[Row]:
    """Compare each with the chosen form of its family, and name the winners."""
    today = {x["family"]: x["seconds"][1] for x in rows if x["form"] == GECKO}
    winners = {str(x) for x in won(rows)}
    for x in rows:
        x["share"] = x["seconds"][1] / today.get(x["family"], math.nan)
        if f"{x['family']}: {x['form']}" in winners:
            x["verdict"] = "**wins**"
    return rows


def _kernels(rows: list[Row], rates: Row) -> list[Row]:
    """Add what is predicted for the step; the kernels that take longest come first."""
    of: dict[str, Any] = {}
    if PREDICTIONS.exists():
        with lzma.open(PREDICTIONS, "rt", encoding="utf-8") as file:
            of = {x["kernel"]: x for x in csv.DictReader(file) if x["step"] == rows[0]["step"]}
    whole = {key: sum(x[key] for x in rows) for key in ("launches", "seconds")}
    for x in rows:
        x["part"] = x["seconds"] / whole["seconds"]
        if found := of.get(x["kernel"]):
            predicted, moved, flops = (float(found[name]) for name in ("seconds", "bytes", "flops"))
            limit = max(moved / rates["copy"], flops / rates["products"])
            x |= {"predicted": predicted, "bytes": moved, "flops": flops}
            x |= {"limit": limit, "share": limit / x["seconds"]}
    return [*sorted(rows, key=lambda x: -x["seconds"]), {"kernel": "all", "part": 1.0, **whole}]


def _tests(rows: list[Row]) -> Iterator[Row]:
    for file in dict.fromkeys(x["file"] for x in rows):
        of = [x for x in rows if x["file"] == file]
        counts = Counter(x["outcome"] for x in of)
        failures = "; ".join(f"{x['test']}: {x['message']}" for x in of if x["outcome"] == "failed")
        yield {"file": file, "failures": failures, **{name: str(counts[name]) for name in OUTCOMES}}


# ---- Targets

SHAPE, MODEL = "gecko-7b", "gecko-1b"
"""The preset whose operators have targets (one row of 32,768 tokens), and the preset whose training has them."""
SHARES = (
    (AVERAGE, "forward", 0.20), (AVERAGE, "with backward", 0.20), (TIMESTEP, "forward", 0.70),
    (TIMESTEP, "with backward", 0.60),
)  # fmt: skip
"""Target share of the copy."""
SPEEDS = {(1, 4_096, CAPTURED_STEP): 1.2, (8, 4_096, ""): 0.9, (1, 32_768, ""): 1.5, (1, 131_072, ""): 3.0}
"""Target speed relative to an eager Llama, by rows, tokens per row and form."""
DECODED = {1: 0.56, 32: 0.69}
"""Target share of the byte limit in decoding, by rows."""


def targets(rows: dict[str, list[Row]], rates: Row) -> Iterator[Row]:
    """Yield targets beside what was measured."""
    for what, least, unit, value in _measured(rows, rates):
        form = ".0%" if least < 1 else ".2f"
        found = {"what": what, "target": f"≥ {least:{'.0%' if least < 1 else 'g'}} {unit}", "measured": "not measured"}
        verdict = "met" if value >= least else "missed"
        yield found if math.isnan(value) else {**found, "measured": f"{value:{form}}", "verdict": verdict}


def _measured(rows: dict[str, list[Row]], rates: Row) -> Iterator[tuple[str, float, str, float]]:
    """Yield what is aimed at, the least value, its unit and the measured one, which is NaN if it was not measured."""

    def of(table: str, key: str, **wanted: Any) -> Any:
        return next((x[key] for x in rows[table] if wanted.items() <= {n: x[n] for n in wanted}.items()), math.nan)

    def operator(name: str, key: str, backward: bool) -> float:
        found = of("operators", key, operator=name, form=GECKO, shape=SHAPE)
        return found[backward] if isinstance(found, Sequence) else found

    for name, what, least in SHARES:
        value = operator(name, "bandwidth", what == "with backward") / rates["copy"]
        yield f"{name}, {what}", least, "of copy bandwidth", value
    yield f"{MIXING}, with backward", 0.55, "of the matrix rate", operator(MIXING, "rate", True) / rates["products"]
    flops = of("training", "flops", model=MODEL, length=32_768, form="")
    yield f"{MODEL}, training at 32,768", 0.50, "MFU", flops / rates["peak"]
    for (count, length, form), least in SPEEDS.items():
        ours = of("training", "speed", model=MODEL, rows=count, length=length, form=form)
        theirs = of("training", "speed", model=f"{LLAMA}, equal to {MODEL}", rows=count, length=length, form="")
        yield f"{MODEL}, training, {count} × {length:,} {form}".rstrip(), least, "× Llama's tokens/s", ours / theirs
    for model in (MODEL, SHAPE):
        for count, least in DECODED.items():
            value = of("decoding", "bandwidth", model=model, form=CAPTURED, rows=count) / rates["copy"]
            yield f"{model}, decoding {count} row{'s' * (count > 1)}", least, "of the byte limit", value
