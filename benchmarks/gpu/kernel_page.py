"""The tables of kernels and of tests, in Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.kernel_times import KernelTime
from gpu.record import Record, Tested
from gpu.timing import Rates

from gecko.io.files import read_object

PREDICTIONS = Path(__file__).parents[1] / "results" / "gpu_budget.json"
"""What ``gpu_budget.py`` predicts for each kernel of the steps."""


@dataclass(frozen=True)
class Prediction:
    """All launches of a kernel in a step: what they need, and the time on the card of ``gpu_budget.py``."""

    kernel: str
    launches: int
    seconds: float
    bytes: float
    flops: float
    instructions: float
    limit: str


def write_predictions(steps: dict[str, list[Prediction]], path: Path) -> None:
    content = {step: [vars(found) for found in kernels] for step, kernels in steps.items()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_predictions(step: str) -> dict[str, Prediction]:
    """Return the predictions for a step by kernel; none if the step was not predicted."""
    content: dict[str, Any] = read_object(PREDICTIONS, "predictions") if PREDICTIONS.exists() else {}
    return {found["kernel"]: Prediction(**found) for found in content.get(step, [])}


def kernel_sections(record: Record, rates: Rates | None) -> list[str]:
    times = list(record.results(KernelTime))
    steps = dict.fromkeys(time.step for time in times)
    lines = [line for step in steps for line in _kernels(step, [x for x in times if x.step == step], rates)]
    return [*lines, *_tests(list(record.results(Tested)))]


def _kernels(step: str, times: list[KernelTime], rates: Rates | None) -> Iterator[str]:
    """Yield the table of one step; the kernels that take longest come first."""
    predictions = read_predictions(step)
    yield from (
        f"## Kernels of a training step: {step}, one block and the head", "",
        "Forward and backward, each kernel timed alone. Bytes of its tensors and FLOPs of its products, and the time "
        "predicted for an H200, are those of `gpu_budget.py`. Limit: the longer of bytes over the copy and FLOPs over "
        "the product above; share: the limit over the measured time. For PyTorch's operations, bytes are those of "
        "whole tensors, also where an operation is a view or touches a part, so a share can exceed 100 %.", "",
        "| kernel | launches | measured, µs | of the step | predicted, µs | MB | GFLOP | limit, µs | share |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    )  # fmt: skip
    whole = sum(time.seconds for time in times)
    for time in sorted(times, key=lambda time: -time.seconds):
        yield (
            f"| {time.kernel} | {time.launches} | {1e6 * time.seconds:,.1f} | {time.seconds / whole:.1%} "
            f"| {_predicted(time, predictions.get(time.kernel), rates)} |"
        )
    yield f"| all | {sum(time.launches for time in times)} | {1e6 * whole:,.1f} | 100.0% | | | | | |"
    yield ""


def _predicted(time: KernelTime, found: Prediction | None, rates: Rates | None) -> str:
    if found is None:
        return "| | | |"
    cells = f"{1e6 * found.seconds:,.1f} | {found.bytes / 1e6:,.1f} | {found.flops / 1e9:,.1f}"
    if rates is None:
        return f"{cells} | |"
    limit = max(found.bytes / rates.copy, found.flops / rates.products)
    return f"{cells} | {1e6 * limit:,.1f} | {limit / time.seconds:.1%}"


def _tests(found: list[Tested]) -> list[str]:
    if not found:
        return []
    lines = [
        "## Tests",
        "",
        "| file of `tests/gpu` | passed | failed | skipped | failures |",
        "|---|---:|---:|---:|---|",
    ]
    for file in dict.fromkeys(x.file for x in found):
        of = [x for x in found if x.file == file]
        counts = Counter(x.outcome for x in of)
        failures = "; ".join(f"{x.test}: {x.message}" for x in of if x.outcome == "failed").replace("|", "/")
        lines.append(f"| {file} | {counts['passed']} | {counts['failed']} | {counts['skipped']} | {failures} |")
    return [*lines, ""]
