"""Pictures and tables of a comparison, for the terminal and for the page ``comparison.html``.

Pictures show held-out loss by tokens and by time: seeds as thin lines, their mean as a thick line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from gecko.eval.results import Interval
from gecko.experiments.compare.plan import rate_name
from gecko.experiments.compare.results import NAME, PAGE, PICTURES, Comparison, Point, RunResult, Summary
from gecko.experiments.compare.runs import Trial
from gecko.io.files import whole_file
from gecko.pages import LineStyle, group_settings, label_line_ends, new_figure, svg, write_html
from gecko.runtime.process import code_name, code_version
from gecko.train.overrides import flatten

_SHOWN = 1 / 3
"""Fraction of the tokens after which the curves determine the scale; before it all losses fall steeply."""
_TOKENS = (("billions", 1e9), ("millions", 1e6), ("thousands", 1e3))
_SECONDS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def loss_by_tokens(runs: Sequence[RunResult]) -> Any:
    """Plot held-out loss by tokens trained on; returns a matplotlib figure."""
    unit, size = _unit(max(run.tokens for run in runs), _TOKENS)
    return _curves(runs, f"tokens trained on, {unit}", lambda point: point.tokens / size)


def loss_by_time(runs: Sequence[RunResult]) -> Any:
    """Plot held-out loss by time in training steps; returns a matplotlib figure."""
    unit, size = _unit(max(run.seconds for run in runs), _SECONDS)
    return _curves(runs, f"time in training steps, {unit}", lambda point: point.seconds / size)


def _curves(runs: Sequence[RunResult], xlabel: str, x: Callable[[Point], float]) -> Any:
    figure, axes = new_figure(xlabel, "held-out loss, nats per byte", height=4.0)
    ends = []
    for number, recipe in enumerate(dict.fromkeys(run.recipe for run in runs)):
        style = LineStyle.of(number)
        curves = [run.curve for run in runs if run.recipe == recipe]
        for curve in curves if len(curves) > 1 else []:
            axes.plot(*_columns(curve, x), color=style.color, linestyle=style.dashes, linewidth=0.6, alpha=0.6)
        mean = _mean(curves, x)
        axes.plot(*mean, **{**style.line(len(mean[0])), "linewidth": 2.0})
        ends.append((mean[1][-1], style, recipe))
    late = [point.nats_per_byte for run in runs for point in _late(run.curve) if point.nats_per_byte is not None]
    if late:
        margin = 0.05 * (max(late) - min(late)) or 0.01
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set_xlim(left=0)
    label_line_ends(axes, [end for end in ends if math.isfinite(end[0])])
    return figure


def _unit(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return name and size of the largest unit for which ``largest`` is at least two units."""
    return next((unit for unit in units if largest >= 2 * unit[1]), units[-1])


def _late(curve: Sequence[Point]) -> Sequence[Point]:
    return [point for point in curve if point.tokens >= _SHOWN * curve[-1].tokens]


def _columns(curve: Sequence[Point], x: Callable[[Point], float]) -> tuple[list[float], list[float]]:
    return [x(point) for point in curve], [_number(point.nats_per_byte) for point in curve]


def _mean(curves: Sequence[Sequence[Point]], x: Callable[[Point], float]) -> tuple[list[float], list[float]]:
    """Return the means over seeds of place and loss at every step; NaN if a loss is not finite."""
    together = list(zip(*curves, strict=True))
    places = [statistics.fmean(x(point) for point in points) for points in together]
    return places, [statistics.fmean(_number(point.nats_per_byte) for point in points) for points in together]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def print_tables(comparison: Comparison, console: Console) -> None:
    """Print the tables, the unfinished runs and the notes."""
    for table in (*summary_tables(comparison), *tuning_tables(comparison)):
        shown = RichTable(
            title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False,
            show_edge=False, collapse_padding=True,
        )  # fmt: skip
        shown.add_column(table.columns[0], overflow="fold")
        for name in table.columns[1:]:
            shown.add_column(name, justify="right", no_wrap=True)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
        if table.note:
            console.print(table.note + "\n")
    for label, state in comparison.unfinished.items():
        console.print(f"not finished: {label} ({state})")
    for note in comparison.notes:
        console.print(f"note: {note}")


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of losses and costs by recipe; empty if no run is finished."""
    if not comparison.summaries:
        return []
    losses = Table(
        "Held-out loss, nats per byte",
        ("recipe", "mean", "95 % interval", "difference", "95 % interval"),
        [_loss_row(summary) for summary in comparison.summaries],
        _loss_note(comparison),
    )
    costs = Table(
        "Training",
        ("recipe", "parameters", "learning rate", "seeds", "tokens/s", "training time"),
        [_cost_row(summary) for summary in comparison.summaries],
        "Training time and tokens/s: mean over seeds, of training steps alone.",
    )
    return [losses, costs]


def tuning_tables(comparison: Comparison) -> list[Table]:
    """Return the table of held-out losses by recipe and learning rate; empty without tuning."""
    tuning = comparison.plan.tuning
    if tuning is None:
        return []
    found = {(trial.recipe, trial.learning_rate): trial for trial in comparison.trials}
    rows = [
        (
            recipe,
            *(_trial_cell(found.get((recipe, rate)), comparison.rates.get(recipe)) for rate in tuning.learning_rates),
        )
        for recipe in comparison.plan.recipes
    ]
    tokens = max((trial.tokens for trial in comparison.trials), default=0)
    return [
        Table(
            f"Tuning: held-out nats per byte after {tuning.steps:,} steps",
            ("recipe", *(rate_name(rate) for rate in tuning.learning_rates)),
            rows,
            f"*: chosen, the lowest. One run each, seed {comparison.plan.seeds[0]}, over {tokens:,} held-out tokens.",
        )
    ]


def run_table(comparison: Comparison) -> Table:
    """Return the table of all finished runs."""
    return Table(
        "Runs",
        ("run", "nats per byte", "held-out tokens", "tokens trained on", "skipped steps", "tokens/s", "training time"),
        [_run_row(run) for run in comparison.runs],
    )


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _loss_row(summary: Summary) -> tuple[str, ...]:
    difference = "" if summary.difference is None else f"{summary.difference:+.4f}"
    return (
        summary.recipe, f"{summary.nats_per_byte:.4f}", _interval(summary.interval, ".4f"), difference,
        "" if summary.difference is None else _interval(summary.difference_interval, "+.4f"),
    )  # fmt: skip


def _cost_row(summary: Summary) -> tuple[str, ...]:
    return (
        summary.recipe, f"{summary.parameters:,}", rate_name(summary.learning_rate), ", ".join(map(str, summary.seeds)),
        f"{summary.tokens_per_second:,.0f}", duration(summary.seconds),
    )  # fmt: skip


def _run_row(run: RunResult) -> tuple[str, ...]:
    return (
        f"{run.recipe} seed {run.seed}", f"{run.evaluation.nats_per_byte:.4f}", f"{run.evaluation.tokens:,}",
        f"{run.tokens:,}", f"{run.skipped_steps}", f"{run.tokens_per_second:,.0f}", duration(run.seconds),
    )  # fmt: skip


def _loss_note(comparison: Comparison) -> str:
    """Return a note on the number of held-out tokens and the methods of the intervals."""
    tokens = sorted({f"{run.evaluation.tokens:,}" for run in comparison.runs})
    intervals = [
        interval
        for summary in comparison.summaries
        for interval in (summary.interval, summary.difference_interval)
        if interval is not None
    ]
    methods = "; ".join(dict.fromkeys(interval.method for interval in intervals)) or "none"
    first = next(iter(comparison.plan.recipes))
    return (
        f"Over {' or '.join(tokens)} held-out tokens per run. Differences: to {first}, paired by seed. "
        f"Intervals: {methods}."
    )


def _trial_cell(trial: Trial | None, chosen: float | None) -> str:
    if trial is None:
        return ""
    loss = trial.state if trial.nats_per_byte is None else f"{trial.nats_per_byte:.4f}"
    return f"{loss} *" if trial.learning_rate == chosen else loss


def _interval(interval: Interval | None, form: str) -> str:
    return "none" if interval is None else f"{interval.low:{form}} .. {interval.high:{form}}"


def write_page(comparison: Comparison) -> Path:
    """Write the page, and its pictures as PNG files beside it.

    Raises:
        ImportError: matplotlib or Jinja is not installed.
    """
    folder, record = comparison.plan.folder, comparison.to_dict()
    path = folder / PAGE
    write_html(
        path,
        "gecko.pages/comparison.html.j2",
        title=f"Comparison: {', '.join(comparison.plan.recipes)}",
        summary=_summary(comparison),
        pictures=[
            _picture(folder, PICTURES[0], loss_by_tokens(comparison.runs), "Held-out loss by tokens"),
            _picture(folder, PICTURES[1], loss_by_time(comparison.runs), "Held-out loss by time"),
        ],
        tables=[*summary_tables(comparison), *tuning_tables(comparison), run_table(comparison)],
        remarks=[*(f"{label}: {state}" for label, state in comparison.unfinished.items()), *comparison.notes],
        settings=group_settings(record["settings"]),
        models={name: flatten(model) for name, model in record["models"].items()},
        machine={**comparison.hardware, "Package": code_name(code_version())},
        command=comparison.command,
    )
    return path


def _picture(folder: Path, name: str, figure: Any, title: str) -> dict[str, str]:
    with whole_file(folder / f"{name}.png") as temporary:
        figure.savefig(temporary, format="png", dpi=200)
    caption = (
        f"{title}: thin lines are seeds, thick lines their means; all points are over the same held-out rows. "
        "The final losses in the tables are over more rows. The first third may lie outside the frame."
    )
    return {"title": title, "svg": svg(figure), "caption": caption}


def _summary(comparison: Comparison) -> str:
    runs = comparison.runs
    return (
        f"{len(runs)} runs of {runs[0].tokens:,} tokens each, of {len(comparison.summaries)} recipes; the same texts "
        f"in the same order for every model of a seed, and the same optimizer. All numbers are in {NAME}."
    )
