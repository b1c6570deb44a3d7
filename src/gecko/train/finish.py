"""End of a run: its final held-out loss, a sample of its text, and an HTML report, all in the folder of the run."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gecko.io.files import Record, write_text
from gecko.models import LanguageModel, LlamaConfig, load_any
from gecko.pages import (
    DARK,
    LIGHT,
    MIDDLE,
    Listing,
    Picture,
    Section,
    border_stride,
    chunk_borders,
    fit,
    new_figure,
    pairs,
    settings_tables,
    write_page,
)
from gecko.parallel.mesh import Ranks
from gecko.runtime.process import code_name, code_version, require
from gecko.train.checkpoints import write_model
from gecko.train.data import RunData
from gecko.train.evaluate import Evaluation, evaluate, sample_text
from gecko.train.metrics import METRICS, finite, read_metrics
from gecko.train.run import Run
from gecko.train.settings import flatten
from gecko.train.throughput import describe_hardware

RESULTS, SAMPLE, REPORT = "results.json", "sample.txt", "report.html"
_FEW = 50
"""Number of points below which a line marks every point and is not smoothed."""
_STEP_FIELDS = {"learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
MARKS = {5.545: "guessing bytes", 2.4: "letters, few words", 1.6: "words, short phrases", 1.0: "looks like the text"}
"""What texts look like at some losses in nats per byte (docs/troubleshooting.md)."""


def loss_curve(training: Sequence[Record], validation: Sequence[Record], marks: Mapping[float, str]) -> Any:
    """Plot training loss (each step and smoothed) and held-out loss (dots) over steps.

    ``marks`` names losses; lines show those within the range of the plot."""
    figure, axes = new_figure("optimizer step", "loss, nats per token")
    points, held_out = _points(training, "loss"), _points(validation, "loss")
    shown = np.concatenate([points, held_out])
    if len(points) < _FEW:
        axes.plot(*points.T, **_line(points), label="training, each step")
    else:
        axes.plot(*points.T, color=LIGHT, linewidth=0.7, alpha=0.7, label="training, each step")
        width = len(points) // 50
        groups = points[: len(points) // width * width].reshape(-1, width, 2)
        smoothed = np.stack([groups[:, width // 2, 0], groups[:, :, 1].mean(axis=1)], axis=1)
        axes.plot(*smoothed.T, **_line(smoothed), label="training, smoothed")
        # In a long run the first, high losses would flatten the rest of the curves.
        shown = np.concatenate([points[len(points) // 20 :], held_out[-1:]])
    axes.plot(*held_out.T, color=DARK, linewidth=1.2, linestyle="--", marker="o", markersize=4, label="held out")
    fit(axes, shown[:, 1].tolist(), 0.1)
    _fit_steps(axes, np.concatenate([points, held_out]))
    low, high = axes.get_ylim()
    for loss, words in marks.items():
        if low < loss < high:
            axes.axhline(loss, color=MIDDLE, linewidth=0.8, linestyle=":")
            axes.annotate(words, (0.99, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
    axes.legend(frameon=False)
    return figure


def step_curve(training: Sequence[Record], field: str, label: str) -> Any:
    """Plot one number of each step as a small picture; None if no record has it.

    The scale is logarithmic if the largest number is more than thirty times the median, as in a run with spikes.
    """
    points = _points(training, field)
    if not len(points):
        return None
    figure, axes = new_figure("optimizer step", label, height=2.5, width=3.2)
    axes.plot(*points.T, **_line(points))
    values = points[:, 1]
    if values.min() > 0 and values.max() > 30 * np.median(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * values.max())
    _fit_steps(axes, points)
    return figure


def _points(records: Sequence[Record], field: str) -> NDArray[np.float64]:
    """Return step and value of the records that have one, (n, 2)."""
    found = [(record["step"], record[field]) for record in records if record.get(field) is not None]
    return np.array(found, dtype=np.float64).reshape(-1, 2)


def _line(points: Sequence[Any] | NDArray[np.float64]) -> dict[str, Any]:
    """Return the style of the main line of a plot. Few points are marked, as one point alone would draw no line."""
    return {"color": "#2a6f97", "linewidth": 1.6, "marker": "o" if len(points) < _FEW else "", "markersize": 4}


def _fit_steps(axes: Any, points: NDArray[np.float64]) -> None:
    """Fit the horizontal axis to whole steps, from 0 to a little after the last one."""
    axes.set_xlim(0, 1.02 * points[:, 0].max(initial=1))
    axes.xaxis.set_major_locator(require("matplotlib.ticker", "train").MaxNLocator(nbins=6, integer=True))


def write_report(
    run: Run, result: Evaluation, parameters: int, prompt: str, sample: str, hardware: Mapping[str, str]
) -> Path:
    """Write ``report.html`` into the run's folder from its metrics, and from what is not in these: the held-out loss of
    the finished model, and its continuation of ``prompt``. Raise ImportError if matplotlib is missing."""
    records = read_metrics(run.folder / METRICS)
    training, validation = ([r for r in records if r["kind"] == kind] for kind in ("train", "validation"))
    steps = [
        Picture(figure, "", small=True)
        for field, label in _STEP_FIELDS.items() if (figure := step_curve(training, field, label))
    ]  # fmt: skip
    note = "Gradient norm: before clipping. Speed: without evaluations and checkpoints."
    sampling = f"Prompt in bold, then up to {run.sample.tokens} tokens at temperature {run.sample.temperature:g}."
    commands = [Listing(run.command(), "Train the same run again:")]
    if not isinstance(run.model, LlamaConfig):  # which no command generates with
        folder = str(run.folder)
        use = ["chat", folder] if run.data.format == "chat" else ["generate", folder, "--prompt", prompt]
        commands.append(Listing(shlex.join(["gecko", *use]), "Write with the trained model:"))
    settings = {name: value for name, value in flatten(run.to_dict()).items() if name != "overrides"}
    sections = [
        *_losses(run, result, training, validation),
        *([Section("Learning rate, gradient norm and speed", note, steps)] if steps else []),
        Section("A sample", sampling, texts=[Listing(sample, bold=prompt)]),
        Section("Numbers", tables=[pairs("", _numbers(run, result, parameters, training))]),
        Section("Hardware and code", tables=[pairs("", {**hardware, "Gecko": code_name(code_version())})]),
        Section("Settings", tables=settings_tables(settings)),
        Section("Commands", texts=commands),
    ]  # fmt: skip
    summary = (
        f"{parameters:,} parameters, {run.steps:,} steps on {', '.join(run.data.sources) or run.data.source}: "
        f"held-out loss {result.nats_per_byte:.3f} nats per byte of text."
    )
    write_page(run.folder / REPORT, f"Training report: {run.folder.name}", summary, sections)
    return run.folder / REPORT


def _losses(run: Run, result: Evaluation, training: Sequence[Record], validation: Sequence[Record]) -> list[Section]:
    smoothing = "" if len(_points(training, "loss")) < _FEW else "Smoothed: means over a fiftieth of the run. "
    # There may be fewer than ``evaluation.rows``.
    rows = max((len(record.get("row_losses", ())) for record in validation), default=0)
    by_step = (
        f"Loss in nats per token. {smoothing}Held out: the same {rows} rows each time, of documents not trained on."
    )
    figure, axes = new_figure("position in the row, tokens", "held-out loss, nats per token")
    length, borders = len(result.loss_by_position) * result.bin_width, ""
    if (chunk := run.model.chunk_size) is not None:
        for border in chunk_borders(length, chunk):
            axes.axvline(border, color=MIDDLE, linewidth=0.8, linestyle=":")
        stride = border_stride(length, chunk)
        which = "chunk borders" if stride == 1 else f"every {stride}th chunk border"
        borders = f"Dotted lines: {which}, {chunk} tokens per chunk. "
    values = [math.nan if loss is None else loss for loss in result.loss_by_position]
    axes.plot([(i + 0.5) * result.bin_width for i in range(len(values))], values, **_line(values))
    # The first positions have little context, so their loss is high and would flatten the rest of the curve.
    fit(axes, values[len(values) // 20 :], 0.05)
    axes.set_xlim(0, length)
    by_position = (
        f"Held-out loss of the finished model, mean over {result.tokens:,} tokens in groups of {result.bin_width} "
        f"positions. {borders}The first positions, without context, may leave the frame."
    )
    marks = MARKS if run.data.tokenizer == "bytes" and run.data.format == "text" else {}
    return [
        Section("Loss", pictures=[Picture(loss_curve(training, validation, marks), by_step)]),
        Section("Loss by position", pictures=[Picture(figure, by_position)]),
    ]


def _numbers(run: Run, result: Evaluation, parameters: int, training: Sequence[Record]) -> dict[str, str]:
    taken = [record for record in training if "skipped" not in record]
    tokens = sum(run.tokens_before(record["step"]) - run.tokens_before(record["step"] - 1) for record in taken)
    numbers = {
        "Held-out loss": f"{result.nats_per_byte:.4f} nats per byte, {result.loss:.4f} nats per token{result.note}",
        "Held-out tokens": f"{result.tokens:,}",
        "Parameters": f"{parameters:,}",
        "Steps": f"{len(training):,}, of which skipped: {len(training) - len(taken)}",
        "Tokens trained on" + ", padding included" * (run.data.format == "chat"): f"{tokens:,}",
    }
    if taken:
        speed = statistics.median(record["tokens_per_second"] for record in taken)
        numbers["Training time, with evaluations"] = f"{training[-1]['seconds'] / 60:.1f} minutes"
        numbers["Tokens/s, median"] = f"{speed:,.0f}"
        numbers["Last training loss"] = f"{taken[-1]['loss']:.4f} nats per token"
    return numbers


def finish_run(
    run: Run, model: LanguageModel, data: RunData, checkpoint: Path, ranks: Ranks
) -> tuple[Evaluation, Path | None]:
    """Evaluate the finished model and return its held-out loss and the path of the report.

    The first rank also writes the model to one file, the results, a sample and the report. The path is None without
    matplotlib, and on all other ranks.
    """
    rows, at_once = len(data.final.rows.tokens), data.final.batch_size * ranks.data_ranks
    console = ranks.console
    console.print(f"computing the final held-out loss of {rows} rows")
    columns = TextColumn("final held-out loss"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # With a bar on a terminal, as it may take a tenth of the run's time.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=-(-rows // at_once))
        result = evaluate(model, data.final, run.precision, ranks, lambda: bar.advance(task))
    if not ranks.is_main:
        return result, None
    if not checkpoint.is_dir():
        raise OSError(
            f"the folder of a run must stay where it is; {run.folder} was moved or deleted during the final held-out "
            "loss. Move it back, and continue with --resume."
        )
    with console.status("sample and report"):
        write_text(run.folder / RESULTS, json.dumps(finite(asdict(result)), indent=2, allow_nan=False) + "\n")
        device = next(model.parameters()).device
        if ranks.world > 1:
            write_model(checkpoint, checkpoint)
            model = load_any(checkpoint).to(device)
        sample = _sample(run, model, data, result, console)
        write_text(run.folder / SAMPLE, data.prompt.text + sample)
    console.print(
        f"final held-out loss over {result.tokens:,} tokens: "
        f"{result.nats_per_byte:.4f} nats per byte, {result.loss:.4f} nats per token{result.note}"
    )
    parameters, hardware = sum(x.numel() for x in model.parameters()), describe_hardware(device, ranks.world)
    try:
        report = write_report(run, result, parameters, data.prompt.text, sample, hardware)
    except ImportError as error:
        console.print(f"no report: {error}")
        return result, None
    console.print(f"report: {report}")
    return result, report


def _sample(run: Run, model: LanguageModel, data: RunData, result: Evaluation, console: Console) -> str:
    """Return a sample of the model's text after the prompt; an empty text and a notice if numbers are not finite."""
    try:
        if not math.isfinite(result.loss):
            raise ValueError("the held-out loss is not finite")
        return data.prompt.end + sample_text(run, model, data.tokenizer, data.prompt)
    except ValueError as error:
        console.print(
            f"no sample: {error}\nThe model has diverged. Try a lower optimizer.learning_rate or a longer "
            "schedule.warmup in another folder with output="
        )
        return ""


def remove_results(run: Run) -> None:
    """Remove the results of an earlier, shorter length of the run: they are not those of the longer run."""
    if (run.folder / RESULTS).is_file():
        for name in (SAMPLE, REPORT, RESULTS):
            (run.folder / name).unlink(missing_ok=True)
