"""What every evaluation returns: numbers with n and interval, and how to get them again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from gecko.eval.intervals import Interval
from gecko.files import whole_file
from gecko.version import code_version

FORMAT = "gecko-evaluation-1"


Report = Callable[[str], None]
"""Told now and then how far an evaluation is."""


def quiet(place: str) -> None:
    """The report to nobody."""


@dataclass(frozen=True)
class Score:
    """One number.

    Raises:
        ValueError: it is not finite, or of nothing.
    """

    name: str
    value: float
    n: int
    """How many ..."""
    unit: str
    """... of these the value is of, in the plural."""
    interval: Interval | None
    """None where it would need more units than there are."""
    where: Mapping[str, str | int | float] = field(default_factory=dict)
    """Which of the evaluation's cases it is of, such as ``{"context": 1024}``."""

    def __post_init__(self) -> None:
        place = ", ".join(f"{key} {value}" for key, value in self.where.items())
        if self.n < 1:
            raise ValueError(f"a score must be of at least one of its {self.unit}; {self.name} ({place}) is of none.")
        if not math.isfinite(self.value):
            raise ValueError(
                f"a score must be finite; {self.name} ({place}) is {self.value}. The model's weights or activations "
                "hold such values, or 16-bit arithmetic overflows: try float32."
            )


@dataclass(frozen=True)
class Results:
    """Of one evaluation of one model."""

    evaluation: str
    scores: list[Score]
    settings: Mapping[str, Any]
    seed: int
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Curves and answers, as JSON values."""

    def save(self, path: Path, model: Mapping[str, Any], command: str, hardware: Mapping[str, str]) -> None:
        """Write JSON, whole or not at all."""
        record = {
            "format": FORMAT, **code_version(), "evaluation": self.evaluation, "model": dict(model),
            "command": command, "seed": self.seed, "hardware": dict(hardware), "settings": dict(self.settings),
            "scores": [asdict(score) for score in self.scores], "notes": self.notes, "details": dict(self.details),
        }  # fmt: skip
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def table(self, title: str) -> Table:
        """All scores, one a row."""
        places = list(dict.fromkeys(key for score in self.scores for key in score.where))
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False)
        for name in (*places, "score"):
            table.add_column(name, overflow="fold")
        for name in ("value", "95 % interval", "n"):
            table.add_column(name, justify="right", no_wrap=True)
        for score in self.scores:
            cells = [_place(score.where.get(name, "")) for name in places]
            table.add_row(*cells, score.name, readable(score.value), _interval(score), f"{score.n:,} {score.unit}")
        return table

    def methods(self) -> str:
        """How the intervals were made."""
        found = dict.fromkeys(score.interval.method for score in self.scores if score.interval is not None)
        return "; ".join(found)


def _interval(score: Score) -> str:
    if score.interval is None:
        return "none"
    return f"{readable(score.interval.low)} .. {readable(score.interval.high)}"


def _place(value: str | int | float) -> str:
    return f"{value:g}" if isinstance(value, float) else readable(value)


def readable(value: str | int | float) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3e}"
