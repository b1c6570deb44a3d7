"""Training of the runs of a comparison in processes, its display, and the choice of learning rates."""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gecko.experiments.compare.plan import LOCK, LOG, ComparisonPlan, Planned, claim, evaluation_of, rate_name
from gecko.experiments.compare.results import duration, plain_table
from gecko.io.files import locked, parse_json, read_lines
from gecko.runtime.terminal import visible
from gecko.train import NonFiniteError, Run, train
from gecko.train.metrics import METRICS, SESSIONS

_TAIL_BYTES = 1 << 16
_TAIL_LINES = 12
_REFRESH_SECONDS = 2.0
_DISPLAYED = {"train": ("step", "loss", "tokens_per_second"), "validation": ("nats_per_byte",)}
"""Numbers of a record that the display needs, by its kind."""
FAILED, DIVERGED = 1, 3
"""Exit codes: settings or data that cannot be trained on, and a run that stopped after too many skipped steps."""
State = Literal["waiting", "training", "finished", "diverged", "failed", "stopped"]


def work(path: Path) -> int:
    """Train the run of the file ``path`` as ``gecko train PATH --resume`` does; return the exit code.

    A worker process does this. When its parent ends, which closes the pipe of its standard input, it saves a checkpoint
    and stops.
    """

    def stop_with_parent() -> None:
        os.read(0, 1)  # with sys.stdin this thread would still hold its lock when Python exits
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_with_parent, daemon=True).start()
    # A worker whose parent was killed may still be saving.
    with locked(path.parent / LOCK, wait=True):
        try:
            train(Run.load(path), resume=True)
        except NonFiniteError as error:
            print(visible(str(error)), file=sys.stderr)
            return DIVERGED
        except (ValueError, FileExistsError, FileNotFoundError) as error:  # the end of the log is shown to users
            print(visible(f"error: {error}"), file=sys.stderr)
            return FAILED
    return 0


class Progress(NamedTuple):
    """Progress of a run."""

    step: int = 0
    loss: float | None = None
    """Loss of the last step in nats per token."""
    held_out: float | None = None
    """Last held-out loss in nats per byte."""
    tokens_per_second: float | None = None
    """Median over the last steps."""


def progress_of(run: Run) -> Progress:
    """Return the progress of a run from the last 64 KiB of its metrics."""
    try:
        with (run.folder / METRICS).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return Progress()
    # The last line may be incomplete, because the file is being written; the first one, because the end alone is read.
    records = [record for line in lines[int(size > _TAIL_BYTES) : -1] if (record := _record(line))]
    steps = [record for record in records if record["kind"] == "train"]
    held_out = [record["nats_per_byte"] for record in records if record["kind"] == "validation"]
    last = held_out[-1] if held_out else None
    if not steps:
        return Progress(held_out=last)
    speed = statistics.median(record["tokens_per_second"] for record in steps[-20:])
    return Progress(steps[-1]["step"], steps[-1]["loss"], last, speed)


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is damaged or lacks a number, because the display must not stop the comparison."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and "kind" in record
    return record if whole and all(name in record for name in _DISPLAYED.get(record["kind"], ())) else None


class Pool:
    """Context manager that trains runs in processes, ``jobs`` at the same time, in order. On exit no process is left.

    Finished runs are skipped and unfinished runs are continued. A failed run does not stop the others.

    Raises:
        ValueError: a run's folder holds something else.
    """

    def __init__(self, planned: Sequence[Planned], jobs: int) -> None:
        self.planned, self.jobs = list(planned), jobs
        self._files = {one.label: claim(one) for one in planned}
        self.states: dict[str, State] = {
            one.label: "finished" if evaluation_of(one.run) else "waiting" for one in planned
        }
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
            self.states[one.label] = "finished" if evaluation_of(one.run) else "stopped"
        self._running.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
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
                [sys.executable, "-m", "gecko.experiments.compare.runs", str(self._files[one.label])],
                stdin=PIPE, stdout=log, stderr=STDOUT, start_new_session=True, env=environment,
            )  # fmt: skip

    def _record(self, one: Planned, process: Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        if evaluation_of(one.run):
            self.states[one.label] = "finished"
            return
        self.states[one.label] = "diverged" if process.returncode == DIVERGED else "failed"
        how = f"exit code {process.returncode}" if process.returncode else "stopped by another process"
        log = one.run.folder / LOG
        end = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_TAIL_LINES:]
        self.failures[one.label] = "\n  ".join([f"{how}; the end of {log}:", *end])


class LiveTable:
    """Display of the pool's runs: a live table on a terminal, while ``live`` is entered, and a line per ended run."""

    def __init__(self, console: Console, pool: Pool, title: str) -> None:
        self._console, self._pool, self._title = console, pool, title
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else nullcontext()
        self._shown = -math.inf

    def update(self, ended: list[Planned]) -> None:
        """Print the results of ended runs, and refresh the table."""
        for one in ended:
            found = evaluation_of(one.run)
            loss = "" if found is None else f"held-out loss {found.nats_per_byte:.4f} nats per byte"
            state = self._pool.states[one.label]
            self._console.print(f"{one.label}: {state}, {loss or self._pool.failures[one.label]}")
        if isinstance(self.live, Live) and (ended or time.monotonic() - self._shown > _REFRESH_SECONDS):
            self.live.update(self._table(), refresh=True)
            self._shown = time.monotonic()

    def _table(self) -> Table:
        found = {one.label: progress_of(one.run) for one in self._pool.planned}
        done = sum(state == "finished" for state in self._pool.states.values())
        table = plain_table(f"{self._title}: {done} of {len(found)} finished{self._left(found)}")
        for name in ("recipe", "run"):
            table.add_column(name, overflow="fold")
        for name in ("step", "loss", "held out", "tokens/s", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in self._pool.planned:
            now, state = found[one.label], self._pool.states[one.label]
            speed = now.tokens_per_second
            left = duration(_tokens_left(one, now) / speed) if speed else ""
            table.add_row(
                one.recipe, one.name, f"{now.step:,}/{one.run.steps:,}", _number(now.loss, ".4f"),
                _number(now.held_out, ".4f"), _number(speed, ",.0f"), left if state == "training" else state,
            )  # fmt: skip
        return table

    def _left(self, found: dict[str, Progress]) -> str:
        """Return the estimated time for all runs, at the mean speed of those that were started."""
        speeds = [progress.tokens_per_second for progress in found.values() if progress.tokens_per_second]
        open_ = [one for one in self._pool.planned if self._pool.states[one.label] in ("waiting", "training")]
        if not speeds or not open_:
            return ""
        tokens = sum(_tokens_left(one, found[one.label]) for one in open_)
        speed = sum(speeds) / len(speeds) * min(self._pool.jobs, len(open_))
        return f", about {duration(tokens / speed)} left"


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
        machines = {_machine(session["hardware"]) for session in read_lines(one.run.folder / SESSIONS, ("hardware",))}
        if others := machines - {_machine(hardware)}:
            notes.append(f"{one.label}: trained on {' and '.join(sorted(others))}")
    return notes


def _machine(hardware: Mapping[str, str]) -> str:
    """Return the GPU, or the processor without the number of its cores."""
    return hardware.get("GPU") or hardware["Processor"].partition(",")[0]


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
