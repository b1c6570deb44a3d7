"""The report of a finished run: one self-contained HTML file beside its metrics."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gecko.baselines import LlamaConfig
from gecko.pages.drawing import border_stride
from gecko.pages.html import write_html
from gecko.train.evaluate import Evaluation
from gecko.train.fields import flatten
from gecko.train.figures import loss_by_position, loss_curve
from gecko.train.metrics import METRICS, Record, read_metrics
from gecko.train.run import Run
from gecko.version import code_name, code_version

REPORT = "report.html"


@dataclass(frozen=True)
class Picture:
    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Table:
    title: str
    rows: dict[str, str]


@dataclass(frozen=True)
class RunFacts:
    """What the metrics file does not know."""

    parameters: int
    evaluation: Evaluation
    """Held-out loss of the finished model."""
    sample: str
    """The model's continuation of ``run.sample.prompt``."""
    hardware: Mapping[str, str]


def write_report(run: Run, facts: RunFacts) -> Path:
    """Write ``report.html`` into the run's folder from its metrics. ImportError where matplotlib is missing."""
    records = read_metrics(run.folder / METRICS)
    training = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    path = run.folder / REPORT
    write_html(
        path,
        "gecko.train/report.html.j2",
        title=f"Training report: {run.folder.name}",
        summary=_summary(run, facts),
        pictures=_pictures(run, facts, training, validation),
        sample_note=f"Prompt in bold, then up to {run.sample.tokens} tokens at temperature {run.sample.temperature:g}.",
        prompt=run.sample.prompt,
        sample=facts.sample,
        tables=[
            Table("Numbers", _numbers(run, facts, training)),
            Table("Hardware and code", {**facts.hardware, "Gecko": code_name(code_version())}),
            Table("Settings", _settings(run)),
        ],
        command=run.command(),
        generate_command=_generate_command(run),
    )
    return path


def _generate_command(run: Run) -> str | None:
    """None for a Llama, which ``gecko generate`` does not take."""
    if isinstance(run.model, LlamaConfig):
        return None
    return shlex.join(["gecko", "generate", str(run.folder), "--prompt", run.sample.prompt])


def _summary(run: Run, facts: RunFacts) -> str:
    return (
        f"{facts.parameters:,} parameters, {run.steps:,} steps on {', '.join(run.data.sources) or run.data.source}: "
        f"held-out loss {facts.evaluation.nats_per_byte:.3f} nats a byte of text."
    )


def _pictures(run: Run, facts: RunFacts, training: Sequence[Record], validation: Sequence[Record]) -> list[Picture]:
    result, chunk = facts.evaluation, run.model.chunk_size
    return [
        Picture(
            "Loss",
            loss_curve(training, validation),
            "Loss in nats a token. Smoothed: means over a fiftieth of the run. "
            f"Held out: the same {_rows_of(validation)} rows each time, of documents not trained on.",
        ),
        Picture(
            "Loss by position",
            loss_by_position(result.loss_by_position, result.bin_width, chunk),
            f"Held-out loss of the finished model, mean over {result.tokens:,} tokens in groups of {result.bin_width} "
            f"positions. {_borders(result, chunk)}"
            "The first positions, without context, may leave the frame.",
        ),
    ]


def _rows_of(validation: Sequence[Record]) -> int:
    """There may be fewer than were asked for."""
    return max((len(record.get("row_losses", ())) for record in validation), default=0)


def _borders(result: Evaluation, chunk: int | None) -> str:
    if chunk is None:
        return ""
    stride = border_stride(len(result.loss_by_position) * result.bin_width, chunk)
    which = "chunk borders" if stride == 1 else f"every {stride}th chunk border"
    return f"Dotted lines: {which}, {chunk} tokens a chunk. "


def _numbers(run: Run, facts: RunFacts, training: Sequence[Record]) -> dict[str, str]:
    taken = [record for record in training if "skipped" not in record]
    numbers = {
        "Held-out loss": f"{facts.evaluation.nats_per_byte:.4f} nats a byte, {facts.evaluation.loss:.4f} a token",
        "Held-out tokens": f"{facts.evaluation.tokens:,}",
        "Parameters": f"{facts.parameters:,}",
        "Steps": f"{len(training):,}, of which skipped: {len(training) - len(taken)}",
        "Tokens trained on": f"{len(taken) * run.tokens_per_step:,}",
    }
    if taken:
        speed = statistics.median(record["tokens_per_second"] for record in taken)
        numbers["Training time, with evaluations"] = f"{training[-1]['seconds'] / 60:.1f} minutes"
        numbers["Tokens a second, median"] = f"{speed:,.0f}"
        numbers["Last training loss"] = f"{taken[-1]['loss']:.4f} nats a token"
    return numbers


def _settings(run: Run) -> dict[str, str]:
    return {name: str(value) for name, value in flatten(run.to_dict()).items() if name != "overrides"}
