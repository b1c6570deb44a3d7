"""``comparison.json``: everything a comparison found, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gecko.compare.checks import common_settings
from gecko.compare.plan import Plan
from gecko.compare.results import RunResult, Summary
from gecko.compare.tuning import Trial
from gecko.files import whole_file
from gecko.train.metrics import METRICS
from gecko.version import code_version

FORMAT, NAME = "gecko-comparison-1", "comparison.json"


@dataclass(frozen=True)
class Comparison:
    """What is known so far."""

    plan: Plan
    command: str
    hardware: Mapping[str, str]
    trials: Sequence[Trial]
    """Of the tuning; none without."""
    rates: Mapping[str, float]
    """The learning rates of the recipes that have one."""
    runs: Sequence[RunResult]
    summaries: Sequence[Summary]
    unfinished: Mapping[str, str]
    """Runs that are not finished, by label: their state."""
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        plan, first = self.plan, next(iter(self.plan.recipes))
        return {
            "format": FORMAT, **code_version(), "command": self.command, "hardware": dict(self.hardware),
            "unit": "held-out nats a byte", "first": first, "seeds": list(plan.seeds),
            "settings": common_settings(plan.recipes[first]), "parameters": dict(plan.parameters),
            "models": {name: run.to_dict()["model"] for name, run in plan.recipes.items()},
            "tuning": None if plan.tuning is None else asdict(plan.tuning) | {
                "trials": [asdict(trial) for trial in self.trials], "chosen": dict(self.rates),
            },
            "recipes": [asdict(summary) for summary in self.summaries],
            "runs": [_run(run) for run in self.runs],
            "unfinished": dict(self.unfinished), "notes": list(self.notes),
        }  # fmt: skip

    def save(self) -> Path:
        """Whole or not at all."""
        path = self.plan.folder / NAME
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return path


def check_folder(folder: Path) -> None:
    """ValueError where the folder is a run's own, or its ``comparison.json`` is none."""
    if (folder / "checkpoints").exists() or (folder / METRICS).exists():
        raise ValueError(f"--out must be a folder for a comparison; {folder} is that of a run. Choose another one.")
    path = folder / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("format")
    except FileNotFoundError:
        return
    except (ValueError, AttributeError):
        found = None
    if found != FORMAT:
        raise ValueError(
            f"{path} must have been written by gecko compare ({FORMAT}); it was not, or it is damaged. Move it away: "
            "it is made again from the runs beside it."
        )


def _run(run: RunResult) -> dict[str, Any]:
    values, evaluation = asdict(run), run.evaluation
    del values["evaluation"]
    return values | {
        "folder": f"{run.recipe}/{run.folder}",
        "nats_per_byte": evaluation.nats_per_byte,
        "nats_per_token": evaluation.loss,
        "held_out_tokens": evaluation.tokens,
    }
