"""Readers of JSON objects (configs, recipes, results) and of JSON Lines files that programs append to."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        what: description of the content for error messages: ``path must hold WHAT as JSON``.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not JSON, or not an object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must hold {what} as JSON; {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold {what} as a JSON object; got a {type(content).__name__}.")
    return content


def parse_object(path: str | Path, what: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return ``parse(content)`` for the object in a JSON file.

    Args:
        what: content of the file for the message, as in ``read_object``.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or a field is missing or does not fit; the message names the file.
    """
    content = read_object(path, what)
    try:
        return parse(content)
    except KeyError as error:
        raise ValueError(f"{path} must hold {what}; the field {error} is missing.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must hold {what}; {error}") from error


Record = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """A damaged line of a JSON Lines file."""

    path: Path
    line: int
    """Counted from 1."""
    reason: str
    torn: bool
    """Whether it is the last line and has no line end, because a process was killed while it wrote."""

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}, must be {self.reason}"


def read_lines(path: Path, fields: Collection[str] = ()) -> list[Record]:
    """Return the records of a file in order, without a torn last line; none if the file does not exist.

    Args:
        fields: names that every record must have.

    Raises:
        OSError: the file cannot be read.
        ValueError: another line is damaged; the message names it.
    """
    records, faults = examine_lines(path, fields)
    for fault in faults:
        if not fault.torn:
            raise ValueError(f"{fault}. Delete the line, or restore the file from a copy.")
    return records


def examine_lines(path: Path, fields: Collection[str] = ()) -> tuple[list[Record], list[Fault]]:
    """Return the records of a file in order, and its damaged lines; nothing if the file does not exist."""
    records: list[Record] = []
    faults: list[Fault] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        # After the last line end there is nothing, or a torn line.
        if number == len(lines) and not line:
            continue
        record, reason = _parse(line, fields)
        if record is not None:
            records.append(record)
        else:
            faults.append(Fault(path, number, reason, torn=number == len(lines)))
    return records, faults


def as_lines(records: Collection[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _parse(line: bytes, fields: Collection[str]) -> tuple[Record | None, str]:
    """Return the record, or None and the rule that the line breaks."""
    try:
        record = json.loads(line)
    except ValueError as error:
        return None, f"a JSON object; {error}"
    if not isinstance(record, dict):
        return None, f"a JSON object; got a {type(record).__name__}"
    missing = [name for name in fields if name not in record]
    if missing:
        return None, f"a JSON object with {', '.join(fields)}; {', '.join(missing)} is missing"
    return record, ""
