"""The numbers that the paper prints, transcribed; they are of its own models, data and scale."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from gecko.report.sections import Statement
from gecko.report.tables import Cell, Table

TABLES = ("training_loss", "academic", "academic_1b", "scrolls")


def published(name: str) -> dict[str, Any]:
    """One of ``TABLES``, or ``statements``, as its file says."""
    file = resources.files("gecko.report") / "published" / f"{name}.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def published_table(name: str) -> Table:
    """One of ``TABLES``, marked as published."""
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
