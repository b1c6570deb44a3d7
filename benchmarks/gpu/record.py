"""Results of a card: a file of lines of JSON, each written at once, so that whatever happens later loses none."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A result: "table" names its table, and the other values have the keys of ``page.TABLES``."""


def noted(what: str, value: float, unit: str = "") -> Row:
    """Return a number that no other table has, with what it means."""
    return {"table": "other", "what": what, "value": value, "unit": unit}


class Record:
    """The lines of a file, and of ``earlier`` files. Results of an item are those of the last file that has it."""

    def __init__(self, path: Path, earlier: Sequence[Path] = ()) -> None:
        self.path, self._paths = path, [*earlier, path]

    def add(self, item: str, row: Row) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"item": item, **row}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self, table: str) -> list[Row]:
        """Return all results of one table."""
        of_item: dict[str, list[Row]] = {}
        for path in self._paths:
            found: dict[str, list[Row]] = {}
            for row in _lines(path):
                found.setdefault(row["item"], []).append(row)
            of_item.update(found)
        return [row for rows in of_item.values() for row in rows if row["table"] == table]


def _lines(path: Path) -> Iterator[Row]:
    """Yield the lines of a file, which may be compressed by xz; the last one may be cut off."""
    if not path.exists():
        return
    content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    for text in content.decode().splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            return
