"""Which code trained a run, and on what: one line of ``sessions.jsonl`` for each time it was started or went on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gecko.train.metrics import read_metrics
from gecko.version import code_version

SESSIONS = "sessions.jsonl"


def record_session(folder: Path, step: int | None, parameters: int, hardware: Mapping[str, str], data: str) -> None:
    """Add a line; ``step`` is the one the session goes on after, None where the run starts, and the file with it.

    Args:
        data: the digest of what it reads.
    """
    line = {"step": step or 0, **code_version(), "parameters": parameters, "hardware": dict(hardware), "data": data}
    with (folder / SESSIONS).open("w" if step is None else "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def check_same_data(folder: Path, data: str) -> None:
    """ValueError where the sessions before read something else than what has the digest ``data``.

    Row i is a function of all documents: with others a run would read some twice, and train on what was held out.
    """
    known = {session["data"] for session in read_sessions(folder) if "data" in session}
    if known - {data}:
        raise ValueError(
            f"the texts and the tokenizer must be those that the run in {folder} was begun with; the names are the "
            "same, but what they hold has changed since. Put back what was there, or start a new run with another "
            "output=; its init_from= takes this one's weights."
        )


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """All lines, in order; none of runs of versions that did not write them."""
    return read_metrics(folder / SESSIONS)
