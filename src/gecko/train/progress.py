"""What a run shows while it trains: a progress bar on a terminal, a line now and then everywhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainingProgress:
    """Context with a bar over the run's steps: loss (nats a token), tokens/s, time taken and time left."""

    def __init__(self, console: Console, step: int, steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._task = self._progress.add_task("training", total=steps, completed=step, loss="-", speed="-")

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{tokens_per_second:,.0f}")

    def say(self, message: str) -> None:
        self._console.print(message)

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
