"""A comparison at work: its runs in processes, their display, and the choice of learning rates."""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gecko.experiments.compare import results
from gecko.experiments.compare.plan import LOCK, LOG, ComparisonPlan, Planned, claim, evaluation_of, rate_name
from gecko.experiments.figures import check_packages
from gecko.experiments.inputs import COMPARISON_FORMAT
from gecko.io.files import Fields, locked, misfit, parse_json, read_lines
from gecko.runtime.process import code_version
from gecko.runtime.terminal import lasting_output, visible
from gecko.train import NonFiniteError, Run, train
from gecko.train.health import StopSignal
from gecko.train.metrics import FIELDS, METRICS, SESSIONS, read_sessions
from gecko.train.throughput import describe_hardware, select_device

_POLL_SECONDS, _REFRESH_SECONDS = 0.3, 2.0
_TAIL_BYTES, _TAIL_LINES = 1 << 16, 12
_DISPLAYED: dict[str, Fields] = {
    "train": {"step": FIELDS["step"], **dict.fromkeys(("loss", "tokens_per_second"), FIELDS["loss"])},
    "validation": {"nats_per_byte": FIELDS["loss"]},
}
"""Numbers of a record that the display needs, by its kind."""
_HARDWARE: Fields = {
    "hardware": (
        "an object with the name of the GPU or the Processor",
        lambda x: isinstance(x, dict) and isinstance(x.get("GPU") or x.get("Processor"), str),
    )
}
FAILED, DIVERGED = 1, 3
"""Exit codes: settings or data that cannot be trained on, and a run that stopped after too many skipped steps."""
State = Literal["waiting", "training", "finished", "diverged", "failed", "stopped"]
Trial = dict[str, Any]
"""Result of a tuning run, as in ``comparison.json``; its loss is None if it was not measured or is not finite."""


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
        ValueError: the folder holds something else, another comparison is running in it, or texts have changed since
            earlier runs in it.
        ImportError: a package for pictures, the page or intervals is not installed.
    """
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1; got {jobs}.")
    check_packages()
    results.check_folder(plan.folder)
    with lasting_output(), locked(plan.folder / LOCK, wait=False), StopSignal() as stop:
        hardware = describe_hardware(select_device(next(iter(plan.recipes.values())).device))
        states, tuning = dict[str, State](), plan.tuning_runs()
        Pool(tuning, jobs, states).train("tuning", console, stop, lambda: None)
        trials = [trial_of(one, states[one.label]) for one in tuning]
        rates, tuned = tuned_rates(plan, trials), not stop.requested
        runs = plan.main_runs(rates) if tuned else []
        comparison = partial(_comparison, plan, command, hardware, trials, rates, runs, states)
        Pool(runs, jobs, states).train("training", console, stop, lambda: results.save(plan.folder, comparison()))
        found = comparison()
        if tuned:  # otherwise the results of earlier calls stay
            results.save(plan.folder, found)
        page = results.write_page(plan.folder, found) if found["runs"] else None
        results.print_tables(found, console)
        # A learning rate with which tuning diverges is a result, not a failure.
        failed = any(states.get(one.label) in ("failed", "diverged") for one in runs)
        untuned = not stop.requested and len(rates) < len(plan.recipes)
        return Outcome(found, stop.requested, failed or untuned, page)


def _comparison(
    plan: ComparisonPlan, command: str, hardware: Mapping[str, str], trials: Sequence[Trial],
    rates: Mapping[str, float], runs: Sequence[Planned], states: Mapping[str, State],
) -> dict[str, Any]:  # fmt: skip
    """Return the values of ``comparison.json``: everything that has been found so far."""
    _check_same_texts([*plan.tuning_runs(), *runs])
    first = next(iter(plan.recipes))
    found = [result for one in runs if (result := results.RunResult.of(one, plan.parameters[one.recipe])) is not None]
    untuned = [
        f"{recipe}: no learning rate was found, for its tuning is not complete or diverged with every rate"
        for recipe in plan.recipes if recipe not in rates and plan.tuning is not None
    ]  # fmt: skip
    return {
        "format": COMPARISON_FORMAT, **code_version(), "command": command, "hardware": hardware,
        "unit": "held-out nats a byte", "first": first, "seeds": list(plan.seeds),
        "settings": plan.settings, "parameters": dict(plan.parameters),
        "models": {name: run.to_dict()["model"] for name, run in plan.recipes.items()},
        "tuning": plan.tuning and {**asdict(plan.tuning), "trials": trials, "chosen": rates},
        "recipes": results.summarise(found, first), "runs": [result.values for result in found],
        "unfinished": {label: state for label, state in states.items() if state != "finished"},
        "notes": [*edge_notes(plan, rates), *machine_notes(runs, hardware), *untuned],
    }  # fmt: skip


def _check_same_texts(planned: Sequence[Planned]) -> None:
    """Raise ValueError unless all runs that were started read the same texts, as the digests in their sessions say."""
    read = {str(one["data"]): run.folder for _, _, run in planned for one in read_sessions(run.folder) if "data" in one}
    if len(read) > 1:
        first, second, *_ = read.values()
        raise ValueError(
            f"runs that are compared must read the same texts; those of {first} and {second} differ, so files have "
            "changed between them. Choose another --out, or remove the folders of the runs with the earlier texts."
        )


class Pool:
    """Runs that are trained in processes, ``jobs`` at the same time, in order, and their states by label.

    Raises:
        ValueError: a run's folder holds something else.
    """

    def __init__(self, planned: Sequence[Planned], jobs: int, states: dict[str, State]) -> None:
        self.planned, self.jobs, self.states = planned, jobs, states
        self._files = {one.label: claim(one) for one in planned}
        states.update({one.label: "finished" if evaluation_of(one.run) else "waiting" for one in planned})
        self._waiting = deque(one for one in planned if states[one.label] == "waiting")
        self._running: dict[str, tuple[Planned, Popen[bytes]]] = {}

    def train(self, title: str, console: Console, stop: StopSignal, after_each: Callable[[], object]) -> None:
        """Train until all runs have ended or a signal came; no process is left.

        A terminal shows a live table. What became of a run is printed when it has ended; then ``after_each`` is called.
        """
        live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        shown = -math.inf
        try:
            with live or nullcontext():
                while (self._waiting or self._running) and not stop.requested:
                    ended = self._advance()
                    for text in ended:
                        console.print(text)
                    if live is not None and (ended or time.monotonic() - shown > _REFRESH_SECONDS):
                        live.update(self.table(title), refresh=True)
                        shown = time.monotonic()
                    if ended:
                        after_each()
                    time.sleep(_POLL_SECONDS)
                if self._waiting or self._running:
                    console.print(f"{stop.requested}: waiting for the running processes to save")
                    self._stop()
        finally:
            for _, process in self._running.values():
                process.kill()
                process.wait()

    def _advance(self) -> list[str]:
        """Start runs while fewer than ``jobs`` are running; return what became of those that have ended."""
        ended = [(one, process) for one, process in self._running.values() if process.poll() is not None]
        for one, _ in ended:
            del self._running[one.label]
        told = [f"{one.label}: {self._end(one, process)}" for one, process in ended]
        while self._waiting and len(self._running) < self.jobs:
            one = self._waiting.popleft()
            self._running[one.label] = one, self._start(one)
            self.states[one.label] = "training"
        return told

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

    def _end(self, one: Planned, process: Popen[bytes]) -> str:
        """Set the state of a run that has ended; return it with the loss, or with the end of the log."""
        assert process.stdin is not None
        process.stdin.close()
        if found := evaluation_of(one.run):
            self.states[one.label] = "finished"
            return f"finished, held-out loss {found.nats_per_byte:.4f} nats per byte"
        self.states[one.label] = "diverged" if process.returncode == DIVERGED else "failed"
        how = f"exit code {process.returncode}" if process.returncode else "stopped by another process"
        log = one.run.folder / LOG
        end = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_TAIL_LINES:]
        return "\n  ".join([f"{self.states[one.label]}, {how}; the end of {log}:", *end])

    def _stop(self) -> None:
        """Terminate the running processes, which save a checkpoint first, and wait for them. Start no other run."""
        self._waiting.clear()
        for _, process in self._running.values():
            process.terminate()
        for one, process in self._running.values():
            process.wait()
            self.states[one.label] = "finished" if evaluation_of(one.run) else "stopped"
        self._running.clear()

    def table(self, title: str) -> Table:
        """Return a table of the runs' progress, with the time left at the mean speed of those that were started."""
        found = {one.label: progress_of(one.run) for one in self.planned}
        states = {one.label: self.states[one.label] for one in self.planned}
        open_ = [one for one in self.planned if states[one.label] in ("waiting", "training")]
        speeds, left = [now.tokens_per_second for now in found.values() if now.tokens_per_second], ""
        if speeds and open_:
            tokens = sum(_tokens_left(one, found[one.label]) for one in open_)
            together = sum(speeds) / len(speeds) * min(self.jobs, len(open_))
            left = f", about {results.duration(tokens / together)} left"
        done = sum(state == "finished" for state in states.values())
        table = results.plain_table(f"{title}: {done} of {len(found)} finished{left}")
        for name in ("recipe", "run"):
            table.add_column(name, overflow="fold")
        for name in ("step", "loss", "held out", "tokens/s", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in self.planned:
            now, state = found[one.label], states[one.label]
            speed, until = now.tokens_per_second, ""
            if speed:
                until = results.duration(_tokens_left(one, now) / speed)
            table.add_row(
                one.recipe, one.name, f"{now.step:,}/{one.run.steps:,}", _number(now.loss, ".4f"),
                _number(now.held_out, ".4f"), _number(speed, ",.0f"),
                until if state == "training" else state,
            )  # fmt: skip
        return table


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
    """Return the progress of a run from the last 64 KiB of its metrics; a damaged line does not stop the comparison."""
    try:
        with (run.folder / METRICS).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return Progress()
    steps, held_out = list[dict[str, Any]](), None
    # The last line may be incomplete, because the file is being written; the first one, because the end alone is read.
    for line in lines[int(size > _TAIL_BYTES) : -1]:
        try:
            record = parse_json(line)
            kind = record["kind"]
            whole = not misfit(record, _DISPLAYED.get(kind, {}))
        except (ValueError, KeyError, TypeError):
            continue
        if whole and kind == "train":
            steps.append(record)
        elif whole and kind == "validation":
            held_out = record["nats_per_byte"]
    if not steps:
        return Progress(held_out=held_out)
    speed = statistics.median(record["tokens_per_second"] for record in steps[-20:])
    return Progress(steps[-1]["step"], steps[-1]["loss"], held_out, speed)


def _tokens_left(one: Planned, progress: Progress) -> int:
    return one.run.tokens_before(one.run.steps or 0) - one.run.tokens_before(progress.step)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def trial_of(one: Planned, state: State) -> Trial:
    evaluation = evaluation_of(one.run)
    loss = None if evaluation is None else evaluation.nats_per_byte
    return {
        "recipe": one.recipe, "learning_rate": one.run.optimizer.learning_rate, "state": state,
        "nats_per_byte": None if loss is None or not math.isfinite(loss) else loss,
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
        for recipe, rate in rates.items() if rate in ends
    ]  # fmt: skip


def machine_notes(planned: Sequence[Planned], hardware: Mapping[str, str]) -> list[str]:
    """Return notes on runs of other machines: the page names one, and times on different ones cannot be compared."""

    def machine(hardware: Mapping[str, str]) -> str:
        """Return the GPU, or the processor without the number of its cores."""
        return hardware.get("GPU") or hardware["Processor"].partition(",")[0]

    notes = []
    for one in planned:
        machines = {machine(found["hardware"]) for found in read_lines(one.run.folder / SESSIONS, _HARDWARE)}
        if others := machines - {machine(hardware)}:
            notes.append(f"{one.label}: trained on {' and '.join(sorted(others))}")
    return notes


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
