"""Training of several recipes on the same data and comparison of their losses: ``gecko compare``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gecko.experiments.compare.plan import LOCK, ComparisonPlan, Planned, Tuning, common_settings
from gecko.experiments.compare.results import RunResult, check_folder, print_tables, save, summarise, write_page
from gecko.experiments.compare.runs import (
    LiveTable,
    Pool,
    State,
    Trial,
    edge_notes,
    machine_notes,
    trial_of,
    tuned_rates,
)
from gecko.experiments.figures import check_packages
from gecko.experiments.inputs import COMPARISON_FORMAT
from gecko.io.files import locked
from gecko.runtime.process import code_version
from gecko.runtime.terminal import lasting_output
from gecko.train.health import StopSignal
from gecko.train.throughput import describe_hardware, select_device

__all__ = ["ComparisonPlan", "Outcome", "Tuning", "check_packages", "compare"]

_POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Outcome:
    """Result of a call of ``compare``."""

    comparison: dict[str, Any]
    """The values of ``comparison.json``."""
    stopped: str | None
    """Name of the signal that stopped the comparison; None if it was not stopped."""
    failed: bool
    """Whether a run failed, or no learning rate was found for a recipe."""
    page: Path | None
    """HTML page; None if no run is finished."""


def compare(plan: ComparisonPlan, *, jobs: int = 1, command: str, console: Console) -> Outcome:
    """Tune learning rates, train all runs and compare them. Finished runs are kept; unfinished runs are continued.

    On Ctrl-C and SIGTERM the running processes save a checkpoint before this returns. A failed run is reported and does
    not stop the others.

    Args:
        jobs: number of runs trained at the same time, each in its own process.
        command: command line of the user, for the record.

    Raises:
        ValueError: the folder holds something else, or another comparison is running in it.
        ImportError: a package for pictures, the page or intervals is not installed.
    """
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1; got {jobs}.")
    check_packages()
    check_folder(plan.folder)
    with lasting_output(), locked(plan.folder / LOCK, wait=False), StopSignal() as stop:
        return _Session(plan, jobs, command, console, stop).run()


class _Session:
    """State of one call of ``compare``."""

    def __init__(self, plan: ComparisonPlan, jobs: int, command: str, console: Console, stop: StopSignal) -> None:
        self.plan, self.jobs, self.command, self.console, self.stop = plan, jobs, command, console, stop
        self.hardware = describe_hardware(select_device(next(iter(plan.recipes.values())).device))
        self.trials: list[Trial] = []
        self.rates: dict[str, float] = {}
        self.main: list[Planned] = []
        """Runs with the chosen learning rates, once these are known."""
        self.states: dict[str, State] = {}

    def run(self) -> Outcome:
        tuning, folder = self.plan.tuning_runs(), self.plan.folder
        self._train(tuning, "tuning", lambda: None)
        self.trials = [trial_of(one, self.states[one.label]) for one in tuning]
        self.rates = tuned_rates(self.plan, self.trials)
        tuned = not self.stop.requested
        if tuned:
            self.main = self.plan.main_runs(self.rates)
            self._train(self.main, "training", lambda: save(folder, self._comparison()))
        comparison = self._comparison()
        if tuned:  # otherwise the results of earlier calls stay
            save(folder, comparison)
        page = write_page(folder, comparison) if comparison["runs"] else None
        print_tables(comparison, self.console)
        # A learning rate with which tuning diverges is a result, not a failure.
        failed = any(self.states.get(one.label) in ("failed", "diverged") for one in self.main)
        untuned = not self.stop.requested and len(self.rates) < len(self.plan.recipes)
        return Outcome(comparison, self.stop.requested, failed or untuned, page)

    def _train(self, planned: Sequence[Planned], title: str, after_each: Callable[[], object]) -> None:
        with Pool(planned, self.jobs) as pool, (table := LiveTable(self.console, pool, title)).live:
            while pool.busy and not self.stop.requested:
                ended = pool.advance()
                table.update(ended)
                self.states |= pool.states
                if ended:
                    after_each()
                time.sleep(_POLL_SECONDS)
            if self.stop.requested and pool.busy:
                self.console.print(f"{self.stop.requested}: waiting for the running processes to save")
                pool.stop()
            self.states |= pool.states

    def _comparison(self) -> dict[str, Any]:
        """Return the values of ``comparison.json``: everything that has been found so far."""
        plan, first = self.plan, next(iter(self.plan.recipes))
        found = [RunResult.of(one, plan.parameters[one.recipe]) for one in self.main]
        results = [result for result in found if result is not None]
        untuned = [
            f"{recipe}: no learning rate was found, for its tuning is not complete or diverged with every rate"
            for recipe in plan.recipes if recipe not in self.rates and plan.tuning is not None
        ]  # fmt: skip
        tuning = plan.tuning and {**asdict(plan.tuning), "trials": self.trials, "chosen": self.rates}
        return {
            "format": COMPARISON_FORMAT, **code_version(), "command": self.command, "hardware": self.hardware,
            "unit": "held-out nats a byte", "first": first, "seeds": list(plan.seeds),
            "settings": common_settings(plan.recipes[first]), "parameters": dict(plan.parameters),
            "models": {name: run.to_dict()["model"] for name, run in plan.recipes.items()}, "tuning": tuning,
            "recipes": summarise(results, first), "runs": [result.values for result in results],
            "unfinished": {label: state for label, state in self.states.items() if state != "finished"},
            "notes": [*edge_notes(plan, self.rates), *machine_notes(self.main, self.hardware), *untuned],
        }  # fmt: skip
