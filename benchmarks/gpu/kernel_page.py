"""The tables of kernels, of the sweep over warps and stages, of tests and of compilations, in Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.kernel_times import KernelTime
from gpu.suites import Tested
from gpu.sweep import Swept
from gpu.timing import Rates
from gpu.warm_cache import Warmed

from gecko.io.files import read_object

if TYPE_CHECKING:  # a record stores these kinds of results
    from gpu.record import Record

PREDICTIONS = Path(__file__).parents[1] / "results" / "gpu_budget.json"
"""What ``gpu_budget.py`` predicts for each kernel of the steps."""
SAME = 1e-2
"""Largest difference at which a variant computes the same: kernels round to 16 bits, and sums change their order."""


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
    return [*lines, *_sweep(list(record.results(Swept))), *_tests(list(record.results(Tested))),
            *_compilations(list(record.results(Warmed)))]  # fmt: skip


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


def _sweep(found: list[Swept]) -> list[str]:
    if not found:
        return []
    kernels = dict.fromkeys((x.step, x.kernel) for x in found)
    return [
        "## Warps and stages", "",
        "One launch of each kernel, with the warps × stages that the operator chooses and with others, on the same "
        f"arguments. A variant that differs by more than {SAME:g} from the chosen one is WRONG and not the best.", "",
        "| kernel | chosen | µs | best | µs | gain | did not run | WRONG |", "|---|---|---:|---|---:|---:|---:|---|",
        *(_swept(kernel, [x for x in found if (x.step, x.kernel) == (step, kernel)]) for step, kernel in kernels), "",
    ]  # fmt: skip


def _swept(kernel: str, variants: list[Swept]) -> str:
    ran = [x for x in variants if x.seconds is not None]
    right = [x for x in ran if x.difference is not None and x.difference <= SAME]
    wrong = ", ".join(f"{_size(x)}: {x.difference:.1e}" for x in ran if x not in right)
    chosen = next((x for x in right if x.chosen), None)
    if chosen is None or not chosen.seconds:
        reason = next((x.reason for x in variants if x.chosen), "not reached")
        return f"| {kernel} | {reason or 'no time'} | | | | | {len(variants) - len(ran)} | {wrong} |"
    best = min(right, key=lambda x: x.seconds or 0.0)
    seconds = best.seconds or 0.0
    return (
        f"| {kernel} | {_size(chosen)} | {1e6 * chosen.seconds:,.1f} | {_size(best)} | {1e6 * seconds:,.1f} "
        f"| {1 - seconds / chosen.seconds:.0%} | {len(variants) - len(ran)} | {wrong} |"
    )


def _size(variant: Swept) -> str:
    return f"{variant.warps} × {variant.stages}"


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


def _compilations(found: list[Warmed]) -> list[str]:
    if not found:
        return []
    return [
        "## Kernels compiled beforehand", "", "| group | kernels | seconds | failed |", "|---|---:|---:|---|",
        *(f"| {x.group} | {x.kernels} | {x.seconds:,.0f} | {x.failed or ''} {x.reason.replace('|', '/')} |"
          for x in found), "",
    ]  # fmt: skip
