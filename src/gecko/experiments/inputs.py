"""Inputs of a report: folders of runs and comparisons, and result files of evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from gecko.eval.results import FORMAT
from gecko.io.files import Record, read_object
from gecko.records import build
from gecko.train.evaluate import with_numbers
from gecko.train.finish import RESULTS
from gecko.train.metrics import METRICS, read_metrics, read_sessions
from gecko.train.settings import ScheduleSettings

RECIPE, COMPARISON, COMPARISON_FORMAT = "recipe.json", "comparison.json", "gecko-comparison-1"
EVALUATIONS = ("perplexity", "positions", "retrieval", "diagnose", "speed", "academic", "scrolls")
_FIELDS = ("evaluation", "model", "command", "seed", "settings", "scores", "details")
_EXPECTED = (
    "a report is made from folders of runs (recipe.json), folders of `gecko compare` (comparison.json) and result "
    "files of `gecko eval ... --out F.json`"
)


@dataclass(frozen=True)
class RunFolder:
    """Files of a training run."""

    folder: Path
    recipe: Mapping[str, Any]
    metrics: list[Record] = field(default_factory=list)
    results: Mapping[str, Any] | None = None
    """None if the run is not finished."""
    sessions: list[Record] = field(default_factory=list)
    """Code and machine of each start and resumption."""

    @property
    def seed(self) -> int:
        return int(self.recipe["seed"])

    @property
    def texts(self) -> str | None:
        """Digest of all texts of the run, trained on and held out; None if an early version wrote the run."""
        return next((one["data"] for one in reversed(self.sessions) if "data" in one), None)

    @cached_property
    def schedule(self) -> ScheduleSettings:
        return build(ScheduleSettings, self.recipe.get("schedule", {}))

    def tokens_before(self, step: int) -> int:
        """Return the tokens of the first ``step`` steps."""
        return self.schedule.rows_before(int(self.recipe["batch_size"]), step) * int(self.recipe["sequence_length"])

    @property
    def steps_done(self) -> int:
        return max((int(record["step"]) for record in self.metrics), default=0)


class EvaluationFile(NamedTuple):
    """Result file of an evaluation, and the run that has it in its folder."""

    path: Path
    record: Mapping[str, Any]
    run: RunFolder | None = None

    @property
    def kind(self) -> str:
        return str(self.record["evaluation"])


@dataclass
class Inputs:
    """Everything that was found, and a record of what is shown and left out."""

    runs: list[RunFolder] = field(default_factory=list)
    evaluations: list[EvaluationFile] = field(default_factory=list)
    comparisons: list[tuple[Path, Mapping[str, Any]]] = field(default_factory=list)
    given: list[tuple[str, str]] = field(default_factory=list)
    """Given paths with a description of each."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Items that the page does not show, with the reason."""

    def leave_out(self, what: Path | str, why: str) -> None:
        if (str(what), why) not in self.left_out:
            self.left_out.append((str(what), why))

    def add(self, path: Path) -> str:
        """Add what stands at a path; return what it is in words."""
        if not path.is_dir():
            if path.name in (RECIPE, COMPARISON):
                raise ValueError(f"{path} belongs to a folder; give the folder: {path.parent}")
            file = EvaluationFile(path, read_evaluation(path))
            return f"evaluation, {file.kind}" if self._add_evaluation(file) else "evaluation, given before"
        if (path / RECIPE).is_file():
            return self._add_run(path)
        seeds = sorted(found.parent for found in path.glob(f"*/seed-*/{RECIPE}"))
        if seeds or (path / COMPARISON).is_file():
            return self._add_comparison(path, seeds)
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
        raise ValueError(f"{_EXPECTED}; the folder {path} is neither: it holds {held}.")

    def _add_evaluation(self, file: EvaluationFile) -> bool:
        """Add a file; return False if it was added before."""
        new = file.path.resolve() not in {one.path.resolve() for one in self.evaluations}
        self.evaluations += [file] if new else []
        return new

    def _add_comparison(self, folder: Path, seeds: Sequence[Path]) -> str:
        order, path = list[str](), folder / COMPARISON
        if path.is_file():
            record = read_object(path, "a comparison")
            if record.get("format") != COMPARISON_FORMAT:
                raise ValueError(f'{path} must be of `gecko compare`, with "format": "{COMPARISON_FORMAT}"; it is not.')
            if not isinstance(record.get("recipes"), list):
                raise ValueError(f"{path} must be a whole comparison of `gecko compare`; it lacks recipes.")
            self.comparisons.append((folder, record))
            order = [recipe["recipe"] for recipe in record["recipes"]]
        else:
            self.leave_out(path, "not there: the comparison is not finished")
        for seed in sorted(seeds, key=lambda seed: order.index(seed.parent.name) if seed.parent.name in order else -1):
            self._add_run(seed)
        if tuning := len(list(folder.glob(f"*/tuning-*/{RECIPE}"))):
            self.leave_out(folder, f"the curves of its {tuning} tuning runs; their losses are in a table")
        return f"comparison, {len(seeds)} runs"

    def _add_run(self, folder: Path) -> str:
        if any(run.folder.resolve() == folder.resolve() for run in self.runs):
            return "run, given before"
        recipe = read_object(folder / RECIPE, "a recipe")
        missing = [name for name in ("model", "data", "batch_size", "sequence_length", "seed") if name not in recipe]
        if missing:
            raise ValueError(f"{folder / RECIPE} must be the recipe of a run; it lacks {', '.join(missing)}.")
        results = None
        if (folder / RESULTS).is_file():
            results = with_numbers(read_object(folder / RESULTS, "the results of a run"))
        run = RunFolder(folder, recipe, read_metrics(folder / METRICS), results, read_sessions(folder))
        files, shown = sorted((folder / "eval").glob("*.json")), 0
        if not run.metrics and not files:
            self.leave_out(folder, "a run without metrics or evaluations: it was never trained")
            return "run, left out"
        self.runs.append(run)
        for path in files:
            try:
                shown += self._add_evaluation(EvaluationFile(path, read_evaluation(path), run))
            except ValueError as error:  # the rest is shown
                self.leave_out(path, str(error))
        steps = f"not finished: {run.steps_done:,} of {recipe.get('steps') or 'an unknown number of'} steps"
        return f"run, {steps if results is None else 'finished'}, {shown} evaluations in its eval/"


def gather(paths: Sequence[Path]) -> Inputs:
    """Read all runs, comparisons and result files at ``paths``, each file once.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: there are no paths, a path is something else, or there is nothing to show.
    """
    if not paths:
        raise ValueError(f"{_EXPECTED}; got none. For example: gecko report runs/demo perplexity.json")
    inputs = Inputs()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{_EXPECTED}; there is no {path}.")
        inputs.given.append((str(path), inputs.add(path)))
    if not inputs.runs and not inputs.evaluations:
        reasons = "; ".join(f"{what}: {why}" for what, why in inputs.left_out)
        raise ValueError(f"a report needs at least one run with metrics or one evaluation; left out were {reasons}.")
    return inputs


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return the record of a result file; ValueError if it is none, or of an evaluation that a report does not show."""
    record = read_object(path, "a result of `gecko eval`")
    if record.get("format") != FORMAT:
        raise ValueError(f'{path} must be a result file of `gecko eval`, with "format": "{FORMAT}"; it is not one.')
    missing = [name for name in _FIELDS if name not in record]
    if missing:
        raise ValueError(f"{path} must be a whole result file of `gecko eval`; it lacks {', '.join(missing)}.")
    if record["evaluation"] not in EVALUATIONS:
        raise ValueError(f"{path} holds the evaluation {record['evaluation']!r}; known are {', '.join(EVALUATIONS)}.")
    return record
