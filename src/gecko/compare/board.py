"""What is shown while runs are trained: a live table on a terminal, a line for each that ends everywhere."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from types import TracebackType

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from gecko.compare.folder import evaluation_of
from gecko.compare.plan import Planned
from gecko.compare.pool import Pool
from gecko.compare.progress import Progress, progress_of

_REFRESH_SECONDS = 2.0


class Board:
    """Context with a table of the pool's runs."""

    def __init__(self, console: Console, pool: Pool, title: str) -> None:
        self._console, self._pool, self._title = console, pool, title
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown = -math.inf

    def update(self, ended: list[Planned]) -> None:
        """Say what came of the runs that ended, and draw the table anew now and then."""
        for one in ended:
            self._console.print(f"{one.label}: {self._result(one)}")
        if self._console.is_terminal and (ended or time.monotonic() - self._shown > _REFRESH_SECONDS):
            self._live.update(self._table(), refresh=True)
            self._shown = time.monotonic()

    def __enter__(self) -> Board:
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
            return f"finished, held-out loss {evaluation.nats_per_byte:.4f} nats a byte"
        return f"{state}, {self._pool.failures[one.label]}"

    def _table(self) -> Table:
        found = {one.label: progress_of(one.run) for one in self._pool.planned}
        done = sum(state == "finished" for state in self._pool.states.values())
        table = Table(
            title=f"{self._title}: {done} of {len(found)} finished{self._left(found)}",
            title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False,
            show_edge=False, collapse_padding=True,
        )  # fmt: skip
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
            _duration(_seconds_left(one, progress)) if state == "training" else state,
        ]  # fmt: skip

    def _left(self, found: dict[str, Progress]) -> str:
        """Of all runs, at the mean speed of those that have begun."""
        speeds = [progress.tokens_per_second for progress in found.values() if progress.tokens_per_second]
        open_ = [one for one in self._pool.planned if self._pool.states[one.label] in ("waiting", "training")]
        if not speeds or not open_:
            return ""
        tokens = sum(((one.run.steps or 0) - found[one.label].step) * one.run.tokens_per_step for one in open_)
        speed = sum(speeds) / len(speeds) * min(self._pool.jobs, len(open_))
        return f", about {_duration(tokens / speed)} left"


def _seconds_left(one: Planned, progress: Progress) -> float | None:
    if not progress.tokens_per_second:
        return None
    return ((one.run.steps or 0) - progress.step) * one.run.tokens_per_step / progress.tokens_per_second


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))
