"""Which code trained a run, and on what: one line of ``sessions.jsonl`` for each time it was started or went on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gecko.train.metrics import read_metrics
from gecko.version import code_version

SESSIONS = "sessions.jsonl"


def record_session(folder: Path, step: int | None, parameters: int, hardware: Mapping[str, str]) -> None:
    """Add a line; ``step`` is the one the session goes on after, None where the run starts, and the file with it."""
    line = {"step": step or 0, **code_version(), "parameters": parameters, "hardware": dict(hardware)}
    with (folder / SESSIONS).open("w" if step is None else "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """All lines, in order; none of runs of versions that did not write them."""
    return read_metrics(folder / SESSIONS)
