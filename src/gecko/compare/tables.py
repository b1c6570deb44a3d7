"""The tables of a comparison, as rows of text for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from gecko.compare.plan import rate_name
from gecko.compare.record import Comparison
from gecko.compare.results import RunResult, Summary
from gecko.compare.tuning import Trial
from gecko.eval.intervals import Interval


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def print_tables(comparison: Comparison, console: Console) -> None:
    """What came out, and what is not finished."""
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
    """Losses and costs by recipe; none while no run is finished."""
    if not comparison.summaries:
        return []
    losses = Table(
        "Held-out loss, nats a byte",
        ("recipe", "mean", "95 % interval", "difference", "95 % interval"),
        [_loss_row(summary) for summary in comparison.summaries],
        _loss_note(comparison),
    )
    costs = Table(
        "What was trained",
        ("recipe", "parameters", "learning rate", "seeds", "tokens/s", "training time"),
        [_cost_row(summary) for summary in comparison.summaries],
        "Training time and tokens/s: mean over seeds, of training steps alone.",
    )
    return [losses, costs]


def tuning_tables(comparison: Comparison) -> list[Table]:
    """Held-out loss by recipe and learning rate; none without tuning."""
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
            f"Tuning: held-out nats a byte after {tuning.steps:,} steps",
            ("recipe", *(rate_name(rate) for rate in tuning.learning_rates)),
            rows,
            f"*: taken, the lowest. One run each, seed {comparison.plan.seeds[0]}, over {tokens:,} held-out tokens.",
        )
    ]


def run_table(comparison: Comparison) -> Table:
    """Every finished run."""
    return Table(
        "Runs",
        ("run", "nats a byte", "held-out tokens", "tokens trained on", "skipped steps", "tokens/s", "training time"),
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
    """How many tokens losses are of, and how the intervals were made."""
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
        f"Over {' or '.join(tokens)} held-out tokens a run. Differences: to {first}, paired by seed. "
        f"Intervals: {methods}."
    )


def _trial_cell(trial: Trial | None, chosen: float | None) -> str:
    if trial is None:
        return ""
    loss = trial.state if trial.nats_per_byte is None else f"{trial.nats_per_byte:.4f}"
    return f"{loss} *" if trial.learning_rate == chosen else loss


def _interval(interval: Interval | None, form: str) -> str:
    return "none" if interval is None else f"{interval.low:{form}} .. {interval.high:{form}}"
