"""Training of the runs of a comparison in processes, its display, and the choice of learning rates."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from types import TracebackType
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gecko.experiments.compare.plan import LOG, ComparisonPlan, Planned, claim, evaluation_of, rate_name
from gecko.experiments.compare.results import duration, plain_table
from gecko.experiments.compare.worker import DIVERGED
from gecko.io.files import parse_json, read_lines
from gecko.train import Run
from gecko.train.metrics import METRICS, SESSIONS

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    step: int = 0
    loss: float | None = None
    """Loss of the last step in nats per token."""
    held_out: float | None = None
    """Last held-out loss in nats per byte."""
    tokens_per_second: float | None = None
    """Median over the last steps."""


_DISPLAYED = {"train": ("step", "loss", "tokens_per_second"), "validation": ("nats_per_byte",)}
"""Numbers of a record that the display needs, by its kind."""


def progress_of(run: Run) -> Progress:
    """Return the progress of a run from the end of its metrics."""
    records = _last_records(run.folder / METRICS)
    steps = [record for record in records if record["kind"] == "train"]
    held_out = [record["nats_per_byte"] for record in records if record["kind"] == "validation"]
    if not steps:
        return Progress(held_out=held_out[-1] if held_out else None)
    speed = statistics.median(record["tokens_per_second"] for record in steps[-20:])
    return Progress(steps[-1]["step"], steps[-1]["loss"], held_out[-1] if held_out else None, speed)


def _last_records(path: Path) -> list[dict[str, Any]]:
    """Return the records in the last 64 KiB of a file; empty if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read()
    except FileNotFoundError:
        return []
    first, *rest = content.split(b"\n")
    lines = [first, *rest] if size <= _TAIL_BYTES else rest
    # The last line may be incomplete, because the file is being written.
    return [record for record in map(_record, lines[:-1]) if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is damaged or lacks a number, because the display must not stop the comparison."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or "kind" not in record:
        return None
    return record if all(name in record for name in _DISPLAYED.get(record["kind"], ())) else None


State = Literal["waiting", "training", "finished", "diverged", "failed", "stopped"]
_TAIL_LINES = 12


class Pool:
    """Context manager that trains runs in processes, ``jobs`` at the same time, in order. On exit no process is left.

    Finished runs are skipped and unfinished runs are continued. A failed run does not stop the others.

    Raises:
        ValueError: a run's folder holds something else.
    """

    def __init__(self, planned: Sequence[Planned], jobs: int) -> None:
        self.planned, self.jobs = list(planned), jobs
        self._files = {one.label: claim(one) for one in planned}
        self.states: dict[str, State] = {one.label: "finished" if self._finished(one) else "waiting" for one in planned}
        """States of the runs by label."""
        self.failures: dict[str, str] = {}
        """Reasons by label of the runs that failed or diverged, with the end of their log."""
        self._waiting = deque(one for one in planned if self.states[one.label] == "waiting")
        self._running: dict[str, tuple[Planned, Popen[bytes]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def advance(self) -> list[Planned]:
        """Start runs while fewer than ``jobs`` are running; return those that have ended since the last call."""
        ended = [one for one, process in self._running.values() if process.poll() is not None]
        for one in ended:
            self._record(one, self._running.pop(one.label)[1])
        while self._waiting and len(self._running) < self.jobs:
            one = self._waiting.popleft()
            self._running[one.label] = one, self._start(one)
            self.states[one.label] = "training"
        return ended

    def stop(self) -> None:
        """Terminate the running processes, which save a checkpoint first, and wait for them. Start no other run."""
        self._waiting.clear()
        for _, process in self._running.values():
            process.terminate()
        for one, process in self._running.values():
            process.wait()
            self.states[one.label] = "finished" if self._finished(one) else "stopped"
        self._running.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _, process in self._running.values():
            process.kill()
            process.wait()

    def _start(self, one: Planned) -> Popen[bytes]:
        environment = dict(os.environ)
        if one.run.threads is None and self.jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.jobs)))
        with (one.run.folder / LOG).open("ab") as log:
            # In its own session the worker does not receive Ctrl-C; this process terminates it.
            return Popen(
                [sys.executable, "-m", "gecko.experiments.compare.worker", str(self._files[one.label])],
                stdin=PIPE, stdout=log, stderr=STDOUT, start_new_session=True, env=environment,
            )  # fmt: skip

    def _record(self, one: Planned, process: Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        if self._finished(one):
            self.states[one.label] = "finished"
            return
        self.states[one.label] = "diverged" if process.returncode == DIVERGED else "failed"
        how = f"exit code {process.returncode}" if process.returncode else "stopped by another process"
        self.failures[one.label] = f"{how}; the end of {one.run.folder / LOG}:\n{_tail(one.run.folder / LOG)}"

    @staticmethod
    def _finished(one: Planned) -> bool:
        return evaluation_of(one.run) is not None


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines)


_REFRESH_SECONDS = 2.0


class LiveTable:
    """Context manager that displays the pool's runs: a live table on a terminal, and one line per ended run."""

    def __init__(self, console: Console, pool: Pool, title: str) -> None:
        self._console, self._pool, self._title = console, pool, title
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown = -math.inf

    def update(self, ended: list[Planned]) -> None:
        """Print the results of ended runs, and refresh the table."""
        for one in ended:
            self._console.print(f"{one.label}: {self._result(one)}")
        if self._console.is_terminal and (ended or time.monotonic() - self._shown > _REFRESH_SECONDS):
            self._live.update(self._table(), refresh=True)
            self._shown = time.monotonic()

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _result(self, one: Planned) -> str:
        state = self._pool.states[one.label]
        if state == "finished":
            evaluation = evaluation_of(one.run)
            assert evaluation is not None
            return f"finished, held-out loss {evaluation.nats_per_byte:.4f} nats per byte"
        return f"{state}, {self._pool.failures[one.label]}"

    def _table(self) -> Table:
        found = {one.label: progress_of(one.run) for one in self._pool.planned}
        done = sum(state == "finished" for state in self._pool.states.values())
        table = plain_table(f"{self._title}: {done} of {len(found)} finished{self._left(found)}")
        for name in ("recipe", "run"):
            table.add_column(name, overflow="fold")
        for name in ("step", "loss", "held out", "tokens/s", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in self._pool.planned:
            table.add_row(one.recipe, one.name, *self._cells(one, found[one.label]))
        return table

    def _cells(self, one: Planned, progress: Progress) -> list[str]:
        state = self._pool.states[one.label]
        return [
            f"{progress.step:,}/{one.run.steps:,}", _number(progress.loss, ".4f"),
            _number(progress.held_out, ".4f"), _number(progress.tokens_per_second, ",.0f"),
            self._time_left(one, progress) if state == "training" else state,
        ]  # fmt: skip

    def _left(self, found: dict[str, Progress]) -> str:
        """Return the estimated time for all runs, at the mean speed of those that were started."""
        speeds = [progress.tokens_per_second for progress in found.values() if progress.tokens_per_second]
        open_ = [one for one in self._pool.planned if self._pool.states[one.label] in ("waiting", "training")]
        if not speeds or not open_:
            return ""
        tokens = sum(_tokens_left(one, found[one.label]) for one in open_)
        speed = sum(speeds) / len(speeds) * min(self._pool.jobs, len(open_))
        return f", about {duration(tokens / speed)} left"

    @staticmethod
    def _time_left(one: Planned, progress: Progress) -> str:
        speed = progress.tokens_per_second
        return duration(_tokens_left(one, progress) / speed) if speed else ""


def _tokens_left(one: Planned, progress: Progress) -> int:
    return one.run.tokens_before(one.run.steps or 0) - one.run.tokens_before(progress.step)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


Trial = dict[str, Any]
"""Result of a tuning run, as in ``comparison.json``; its loss is None if it was not measured or is not finite."""


def trial_of(one: Planned, state: State) -> Trial:
    evaluation, loss = evaluation_of(one.run), None
    if evaluation is not None and math.isfinite(evaluation.nats_per_byte):
        loss = evaluation.nats_per_byte
    return {
        "recipe": one.recipe, "learning_rate": one.run.optimizer.learning_rate, "state": state, "nats_per_byte": loss,
        "tokens": 0 if evaluation is None else evaluation.tokens,
    }  # fmt: skip


def tuned_rates(plan: ComparisonPlan, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the learning rate with the lowest held-out loss, for recipes whose tuning runs have all ended.

    A diverged run is worse than any other. Without tuning each recipe keeps its own rate.
    """
    if plan.tuning is None:
        return {name: run.optimizer.learning_rate for name, run in plan.recipes.items()}
    rates = {}
    for recipe in plan.recipes:
        tried = [trial for trial in trials if trial["recipe"] == recipe]
        finite = [trial for trial in tried if trial["nats_per_byte"] is not None]
        if finite and all(trial["state"] in ("finished", "diverged") for trial in tried):
            rates[recipe] = min(finite, key=itemgetter("nats_per_byte"))["learning_rate"]
    return rates


def edge_notes(plan: ComparisonPlan, rates: Mapping[str, float]) -> list[str]:
    """Return notes on chosen rates that are the lowest or highest tried; a better one may lie outside the range."""
    if plan.tuning is None:
        return []
    tried = plan.tuning.learning_rates
    ends = {min(tried): "lowest", max(tried): "highest"}
    return [
        f"{recipe}: the best learning rate, {rate_name(rate)}, is the {ends[rate]} of those tried; a better one may "
        "lie beyond it"
        for recipe, rate in rates.items()
        if rate in ends
    ]


def machine_notes(planned: Sequence[Planned], hardware: Mapping[str, str]) -> list[str]:
    """Return notes on runs of other machines: the page names one, and times on different ones cannot be compared."""
    notes = []
    for one in planned:
        sessions = read_lines(one.run.folder / SESSIONS, ("hardware",))
        machines = {_machine(session["hardware"]) for session in sessions}
        if others := machines - {_machine(hardware)}:
            notes.append(f"{one.label}: trained on {' and '.join(sorted(others))}")
    return notes


def _machine(hardware: Mapping[str, str]) -> str:
    """Return the GPU, or the processor without the number of its cores."""
    return hardware.get("GPU") or hardware["Processor"].partition(",")[0]
