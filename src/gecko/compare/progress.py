"""How far a run is, by what it has written."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gecko.train import Run
from gecko.train.metrics import METRICS

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Progress:
    step: int = 0
    loss: float | None = None
    """Of the last step, nats a token."""
    held_out: float | None = None
    """The last one, nats a byte."""
    tokens_per_second: float | None = None
    """Median over the last steps."""


def progress_of(run: Run) -> Progress:
    """By the end of the run's metrics."""
    records = _last_records(run.folder / METRICS)
    steps = [record for record in records if record["kind"] == "train"]
    held_out = [record["nats_per_byte"] for record in records if record["kind"] == "validation"]
    if not steps:
        return Progress(held_out=held_out[-1] if held_out else None)
    speed = statistics.median(record["tokens_per_second"] for record in steps[-20:])
    return Progress(steps[-1]["step"], steps[-1]["loss"], held_out[-1] if held_out else None, speed)


def _last_records(path: Path) -> list[dict[str, Any]]:
    """Whole lines of the file's last 64 KiB; none where there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read()
    except FileNotFoundError:
        return []
    first, *rest = content.split(b"\n")
    lines = [first, *rest] if size <= _TAIL_BYTES else rest
    # What follows the last line end is a line that is being written.
    return [json.loads(line) for line in lines[:-1]]
