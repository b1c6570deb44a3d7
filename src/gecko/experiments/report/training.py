"""Sections on training: losses by tokens and by time, final losses, and the results of ``gecko compare``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gecko.eval.results import Interval, over_rows, over_seeds, readable
from gecko.experiments.report.material import Material, RunFolder
from gecko.experiments.report.models import Identity, Subject
from gecko.experiments.report.tables import PLAIN, Cell, Picture, Section, Table, published_table, span
from gecko.pages import label_line_ends, new_figure, svg
from gecko.runtime.process import require
from gecko.train.metrics import seconds_by_step

_TOKENS = "tokens read"
_SETTLED = 0.25
"""Fraction of a run after which its loss determines the picture's frame."""
_TRAINING_POINTS = 50


class Point(NamedTuple):
    """Loss at a step."""

    step: int
    place: float
    """Position on the x axis."""
    loss: float


Line = tuple[Subject, Sequence[Sequence[Point]]]
"""A model with the points of each of its seeds."""


@dataclass(frozen=True)
class Trained:
    """Runs of one model by seed."""

    subject: Subject
    runs: Mapping[int, RunFolder]


def trained(
    runs: Sequence[RunFolder], identities: Mapping[Path, Identity], subjects: Mapping[Any, Subject], material: Material
) -> list[Trained]:
    """Group runs by model. If two runs have the same seed, the second is left out."""
    found: dict[Any, dict[int, RunFolder]] = {}
    for run in runs:
        identity = identities[run.folder]
        seeds, seed = found.setdefault(identity.key, {}), int(run.recipe["seed"])
        if seeds.setdefault(seed, run) is not run:
            material.leave_out(run.folder, f"trained like {seeds[seed].folder}, with the same seed")
    return [Trained(subjects[key], seeds) for key, seeds in found.items()]


def training_sections(models: Sequence[Trained], material: Material) -> list[Section]:
    """Return the training section, with separate pictures per held-out text, because only their losses compare."""
    if not models:
        return []
    groups: dict[str, list[Trained]] = {}
    for model in models:
        data = next(iter(model.runs.values())).recipe["data"]
        groups.setdefault(str(sorted((key, str(value)) for key, value in data.items())), []).append(model)
    pictures = [picture for group in groups.values() for picture in _pictures(group, material)]
    intro = "Thick lines: means over seeds at common steps; thin lines: seeds." if _several_seeds(models) else ""
    if len(groups) > 1:
        intro += " Runs with other texts or tokenizers have their own pictures."
    tables = [_final_table(models), _models_table(models), published_table("training_loss")]
    return [Section("Training", intro.strip(), pictures, tables)]


def held_out_points(run: RunFolder, clock: Mapping[int, float]) -> list[Point]:
    """Return held-out losses in nats per byte. ``clock`` gives the place of each step."""
    return [
        Point(record["step"], clock[record["step"]], record["nats_per_byte"]) for record in run.metrics
        if record["kind"] == "validation" and record.get("nats_per_byte") is not None and record["step"] in clock
    ]  # fmt: skip


def training_points(run: RunFolder, clock: Mapping[int, float]) -> list[Point]:
    """Return training losses in nats per token: means over each complete fiftieth of the run, at its middle step.

    The steps depend only on the run's length, so all seeds have the same steps.
    """
    steps = [record for record in run.metrics if record["kind"] == "train"]
    last = max((record["step"] for record in steps), default=0)
    width = max(1, int(run.recipe.get("steps") or last) // _TRAINING_POINTS)
    found: dict[int, list[float]] = {}
    for record in steps:
        if record.get("loss") is not None:
            found.setdefault((record["step"] - 1) // width, []).append(record["loss"])
    middles = {group * width + width // 2 + 1: losses for group, losses in found.items() if (group + 1) * width <= last}
    return [Point(step, clock[step], statistics.fmean(losses)) for step, losses in middles.items()]


def token_clock(run: RunFolder) -> dict[int, float]:
    """Return the tokens read until the end of each step."""
    steps = {0, *(int(record["step"]) for record in run.metrics)}
    return {step: run.tokens_before(step) for step in steps}


def minute_clock(run: RunFolder) -> dict[int, float]:
    """Return the minutes in training steps until the end of each step, without evaluations and checkpoints."""
    return {step: seconds / 60 for step, seconds in seconds_by_step(run.metrics, run.tokens_before).items()}


def _several_seeds(models: Sequence[Trained]) -> bool:
    return any(len(model.runs) > 1 for model in models)


_AXES: Sequence[tuple[str, Callable[[RunFolder], dict[int, float]], Any, str]] = (
    (_TOKENS, token_clock, held_out_points, "held-out loss, nats per byte"),
    ("minutes in training steps", minute_clock, held_out_points, "held-out loss, nats per byte"),
    (_TOKENS, token_clock, training_points, "training loss, nats per token"),
)


def _pictures(models: Sequence[Trained], material: Material) -> list[Picture]:
    pictures, data = [], next(iter(models[0].runs.values())).recipe["data"]
    for xlabel, clock, points, ylabel in _AXES:
        what = ylabel.partition(",")[0]
        measured = [(model.subject, [points(run, clock(run)) for run in model.runs.values()]) for model in models]
        shown = list(_shown(measured, what, material))
        if shown:
            about = f"{what.capitalize()} by {xlabel}, on {_texts(data)}."
            pictures.append(Picture(_curves(shown, xlabel, ylabel), f"{about} The start may lie outside the frame."))
    return pictures


def _shown(measured: Sequence[Line], what: str, material: Material) -> Iterator[Line]:
    """Yield each model with its measured seeds, if their mean exists."""
    for subject, seeds in measured:
        found = [seed for seed in seeds if seed]
        if len(found) < len(seeds):
            material.leave_out(subject.label, f"{what}: not measured in every run")
        if mean_over_seeds(found):
            yield subject, found
        elif found:
            material.leave_out(subject.label, f"{what}: at no step measured with all seeds")


def _texts(data: Mapping[str, Any]) -> str:
    sources = ", ".join(data.get("sources") or [str(data.get("source"))])
    held_out = data.get("validation")
    apart = f"held out: {held_out}" if held_out else f"{data.get('validation_fraction')} held out"
    return f"{sources} ({apart}; tokenizer {data.get('tokenizer')})"


def _curves(lines: Sequence[Line], xlabel: str, ylabel: str) -> str:
    figure, axes = new_figure(xlabel, ylabel)
    ends, settled = [], []
    for subject, seeds in lines:
        main = mean_over_seeds(seeds)
        for seed in seeds if len(seeds) > 1 else []:
            axes.plot(*_columns(seed), color=subject.style.color, linewidth=0.6, alpha=0.6)
        axes.plot(*_columns(main), **subject.style.line(len(main)))
        settled += [it.loss for points in (main, *seeds) for it in points if it.place >= _SETTLED * points[-1].place]
        ends.append((main[-1].loss, subject.style, subject.label))
    low, high = min(settled), max(settled)
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(left=0)
    if xlabel == _TOKENS:
        axes.xaxis.set_major_formatter(require("matplotlib.ticker", "train").EngFormatter(sep=" "))
    label_line_ends(axes, ends)
    return svg(figure)


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.place for point in points], [point.loss for point in points]


def mean_over_seeds(seeds: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the means of place and loss over seeds, at common steps."""
    by_step = [{point.step: point for point in seed} for seed in seeds]
    return [
        Point(step, *map(statistics.fmean, _columns([seed[step] for seed in by_step])))
        for step in (by_step[0] if by_step else ())
        if all(step in seed for seed in by_step)
    ]


def _final_table(models: Sequence[Trained]) -> Table:
    columns = [("model", ""), ("seeds", ""), ("nats per byte", "of held-out text"), ("nats per token", ""), ("n", "")]
    rows = [row for model in models for row in (_finished_row(model), _unfinished_row(model)) if row is not None]
    note = (
        "Intervals, 95 %: Student's t over seeds; for one seed a bootstrap over held-out rows, which does not include "
        "the variance between seeds. Between tokenizers compare nats per byte."
    )
    return Table("Held-out loss of the finished models", columns, rows, 1, [note])


def _finished_row(model: Trained) -> list[Cell] | None:
    results = {seed: run.results for seed, run in model.runs.items() if run.results is not None}
    if not results:
        return None
    losses = [_mean_cell(list(results.values()), name) for name in ("nats_per_byte", "loss")]
    counts = sorted({f"{one['tokens']:,} tokens" for one in results.values()})
    each = "for each seed" if len(results) > 1 else ""
    return [Cell(model.subject.label), Cell(", ".join(map(str, results))), *losses, Cell(" or ".join(counts), each)]


def _mean_cell(results: Sequence[Mapping[str, Any]], name: str) -> Cell:
    values = [float(one[name]) for one in results]
    if len(values) > 1:
        interval = over_seeds(values)
    else:
        (one,) = results
        # Older results do not have losses by row.
        interval = over_rows(one.get("row_losses") or [], one.get("row_targets") or [], values[0] / one["loss"])
    return Cell(readable(statistics.fmean(values)), span(interval, PLAIN))


def _unfinished_row(model: Trained) -> list[Cell] | None:
    steps = [f"seed {seed}: {run.steps_done:,} steps" for seed, run in model.runs.items() if run.results is None]
    if not steps:
        return None
    return [Cell(model.subject.label), Cell("not finished", "; ".join(steps)), Cell(""), Cell(""), Cell("")]


def _models_table(models: Sequence[Trained]) -> Table:
    columns = [("model", ""), ("differs in", ""), ("parameters", ""), ("steps", ""), ("tokens", ""),
               ("learning rate", ""), ("tokens/s", "median of steps")]  # fmt: skip
    rows = [[Cell(text) for text in _model_row(model)] for model in models]
    return Table(
        "Models", columns, rows, 1, ["Speeds are those of the machines under Reproduction, with the load they had."]
    )


def _model_row(model: Trained) -> list[str]:
    run = next(iter(model.runs.values()))
    steps = run.recipe.get("steps")
    speeds = [record["tokens_per_second"] for one in model.runs.values() for record in one.metrics
              if record["kind"] == "train" and record.get("tokens_per_second")]  # fmt: skip
    rate = run.recipe.get("optimizer", {}).get("learning_rate")
    return [
        model.subject.label, model.subject.differences or "–",
        "not recorded" if run.parameters is None else f"{run.parameters:,}",
        f"{steps:,}" if steps else "not fixed", f"{run.tokens_before(steps):,}" if steps else "–",
        "–" if rate is None else f"{rate:g}", f"{statistics.median(speeds):,.0f}" if speeds else "–",
    ]  # fmt: skip


def comparison_sections(comparisons: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[Section]:
    """Return the section on ``gecko compare``: losses, differences paired by seed, and tuning."""
    tables = [table for folder, record in comparisons for table in (_losses(folder, record), _tuning(folder, record))]
    if not tables:
        return []
    intro = "Models trained on the same texts in the same order, with the same optimizer."
    return [Section("Comparison", intro, [], [table for table in tables if table is not None])]


def _losses(folder: Path, record: Mapping[str, Any]) -> Table:
    first = record["first"]
    columns = [("model", ""), ("parameters", ""), ("seeds", ""), (record["unit"], ""), (f"minus {first}", "paired"),
               ("n", "of each seed")]  # fmt: skip
    methods: dict[str, None] = {}
    rows = []
    for one in record["recipes"]:
        of = _interval(one["interval"], methods)
        difference = Cell("–")
        if one["difference"] is not None:
            difference = Cell(f"{one['difference']:+.4f}", _signed(_interval(one["difference_interval"], methods)))
        counts = {f"{run['held_out_tokens']:,} tokens" for run in record["runs"] if run["recipe"] == one["recipe"]}
        rows.append([
            Cell(one["recipe"]), Cell(f"{one['parameters']:,}"), Cell(", ".join(map(str, one["seeds"]))),
            Cell(readable(one["nats_per_byte"]), span(of, PLAIN)), difference, Cell(" or ".join(sorted(counts))),
        ])  # fmt: skip
    notes = [f"Intervals: {'; '.join(methods) or 'none'}.", *record["notes"]]
    notes += [f"Not finished: {run} ({state})." for run, state in record["unfinished"].items()]
    return Table(f"Losses of {folder.name}, compared", columns, rows, 1, notes)


def _tuning(folder: Path, record: Mapping[str, Any]) -> Table | None:
    tuning = record["tuning"]
    if tuning is None:
        return None
    rates, chosen = tuning["learning_rates"], tuning["chosen"]
    trials = {(trial["recipe"], trial["learning_rate"]): trial for trial in tuning["trials"]}
    names = list(dict.fromkeys(trial["recipe"] for trial in tuning["trials"]))
    rows = [[Cell(name), *(_trial(trials.get((name, rate)), chosen.get(name) == rate) for rate in rates)]
            for name in names]  # fmt: skip
    counts = sorted({f"{trial['tokens']:,}" for trial in tuning["trials"] if trial.get("tokens")})
    note = (
        f"{record['unit'].capitalize()} after {tuning['steps']:,} steps, one seed, over {' or '.join(counts) or 'no'} "
        "tokens; no intervals."
    )
    return Table(f"Learning rates of {folder.name}", [("model", ""), *((f"{rate:g}", "") for rate in rates)], rows, 1,
                 [note])  # fmt: skip


def _trial(trial: Mapping[str, Any] | None, chosen: bool) -> Cell:
    if trial is None:
        return Cell("")
    value = trial["nats_per_byte"]
    return Cell(trial["state"] if value is None else readable(value), "chosen" if chosen else "")


def _interval(found: Mapping[str, Any] | None, methods: dict[str, None]) -> Interval | None:
    if found is None:
        return None
    methods.setdefault(found["method"])
    return Interval(**found)


def _signed(interval: Interval | None) -> str:
    return "no interval" if interval is None else f"{interval.low:+.4f} to {interval.high:+.4f}"
