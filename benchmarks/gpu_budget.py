"""What the kernels can reach on an H200, predicted from their compiled code. No GPU is needed.

    python benchmarks/gpu_budget.py --write           # writes gpu_budget.md and gpu_budget.csv.xz in benchmarks/results
    python benchmarks/gpu_budget.py --steps --write   # gpu_budget.csv.xz only, with the kernels of a training step

Every launch of every operator is recorded at the shapes of models, compiled for sm_90 and disassembled.
``launch_costs.py`` has the arithmetic.
"""

from __future__ import annotations

import csv
import lzma
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from gpu.operators import MIXING, Operator, Shape, forward_and_backward, operators
from gpu.page import PREDICTIONS
from gpu.timing import Bench
from kernels.recording import launches, model_on_nothing
from launch_costs import COPY, PRODUCTS, Cost, costs, merged
from measuring import RESULTS, parsed, parser_of, table

from gecko.config import GeckoConfig
from gecko.experiments.rows import grouped
from gecko.train.step import autocast

LENGTH = 32_768
LEFT_OUT = ("head and loss",)
"""Operators whose time is in products of cuBLAS."""


def predicted(shape: Shape) -> Iterator[tuple[Operator, list[Cost], list[Cost]]]:
    """Yield each operator with the costs of its forward pass alone, and of both passes."""
    bench = Bench(torch.device("cpu"))
    found: list[Operator] = []
    launches(lambda: found.extend(operators(shape, bench)), lambda _: None)
    for operator in found:
        if operator.name not in LEFT_OUT:
            with torch.no_grad():
                forward = costs(partial(operator.function, *operator.inputs))
            yield operator, forward, costs(partial(forward_and_backward, operator))


def share(operator: Operator, found: list[Cost], numbers: float, flops: float) -> tuple[float, str]:
    """Return the floor of time as a share of the predicted time, and what the floor is."""
    seconds = sum(cost.seconds for cost in found)
    if operator.name == MIXING or operator.name in ("chunk attention", "working memory"):
        return flops / PRODUCTS / seconds, "products"
    return 2 * numbers / COPY / seconds, "bytes"


def summary(results: list[tuple[Operator, list[Cost], list[Cost]]]) -> Iterator[tuple[str, ...]]:
    """Yield a row per operator."""
    for operator, forward, both in results:
        floor, found = operator.floor, (forward, both)
        numbers, flops = (floor.numbers_forward, floor.numbers_both), (floor.flops_forward, floor.flops_both)
        (ahead, of), (whole, _) = map(partial(share, operator), found, numbers, flops)
        times = (f"{1e3 * sum(cost.seconds for cost in one):.3f}" for one in found)
        moved = (f"{sum(cost.bytes for cost in one) / 2 / n:.2f}" for one, n in zip(found, numbers, strict=True))
        counts, shown = (str(len(one)) for one in found), f"{ahead:.0%} / {whole:.0%} of {of}"
        yield operator.name, *(" / ".join(pair) for pair in (counts, times, moved)), shown


KERNELS = (
    "operator", "kernel", "launches|d", "MB|,.1f", "bytes/element|.2f", "instructions/element|.1f", "GFLOP|,.0f",
    "warps|d", "registers|d", "programs/SM|d", "waves|.1f", "KB in flight/SM|.0f", "µs|.0f", "limit",
)  # fmt: skip


def kernels(operator: Operator, both: list[Cost], elements: float) -> Iterator[tuple[object, ...]]:
    """Yield a row per kernel of an operator."""
    for count, cost in merged(both):
        yield (
            operator.name, cost.name, count, cost.bytes / 1e6, cost.bytes / elements,
            32 * cost.instructions / elements, cost.flops / 1e9, cost.warps, cost.registers, cost.resident, cost.waves,
            cost.in_flight / 1e3, 1e6 * cost.seconds, cost.limit,
        )  # fmt: skip


def steps(names: list[str]) -> Iterator[tuple[object, ...]]:
    """Yield what each kernel needs in a training step of one block and the head of each preset."""
    for preset in names:
        by_name = grouped(costs(_step(GeckoConfig.preset(preset))), lambda cost: cost.name)
        for name, group in by_name.items():
            sums = (sum(getattr(cost, field) for cost in group) for field in ("seconds", "bytes", "flops"))
            yield f"{preset}, {LENGTH:,} tokens", name, len(group), *(f"{x:.10g}" for x in sums)


def _step(config: GeckoConfig) -> Callable[[], None]:
    """Return a function that computes loss and gradients of a row, under autocast to bfloat16."""
    model = model_on_nothing(replace(config, num_layers=1))
    text = torch.randint(config.vocab_size, (1, LENGTH + 1))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with autocast("bfloat16", text.device):
            loss = model.loss(text[:, :-1], text[:, 1:])
        loss.backward()  # outside, as in training: autocast would round products of gradients

    return step


def section(name: str) -> list[str]:
    """Return both tables of one preset."""
    config = GeckoConfig.preset(name)
    results = list(predicted(Shape(name, config, LENGTH)))
    elements = LENGTH * config.model_dim
    rows = (row for one, _, both in results if one.name != MIXING for row in kernels(one, both, elements))
    columns = ["operator", "launches forward / both", "predicted ms", "bytes, of the floor's|>", "share of the limit"]
    return [f"## {name}", table(columns, summary(results)), table(KERNELS, rows)]


def page(names: list[str]) -> str:
    return "\n\n".join([
        "# Budget of the kernels on an H200",
        f"**A prediction, not a measurement: no GPU was at hand.** One row of {LENGTH:,} tokens, bfloat16. Every "
        "launch is compiled for sm_90; bytes are those of its tensors, instructions and tensor-core products those of "
        "its machine code. An element is one of the model's features of one token; instructions are per thread. The "
        "limit is what the predicted time is made of. `benchmarks/launch_costs.py` has rates and arithmetic.",
        *(part for name in names for part in section(name)),
        f"Written by `python benchmarks/gpu_budget.py --models {' '.join(names)} --write`.\n",
    ])  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, models=(["gecko-1b", "gecko-7b"], "presets"))
    parser.add_argument("--steps", action="store_true", help="only training steps, for the table of kernels of a card")
    given = parsed(parser)
    if not given.steps:
        text = page(given.models)
        print(text)
        if given.write:
            (RESULTS / "gpu_budget.md").write_text(text, encoding="utf-8")
    found = list(steps(given.models))
    for step, lines in grouped(found, lambda line: line[0]).items():
        print(f"{step}: {1e3 * sum(float(seconds) for *_, seconds, _, _ in lines):.2f} ms predicted")
    if given.write:
        with lzma.open(PREDICTIONS, "wt", preset=9, encoding="utf-8", newline="") as file:
            columns = "step", "kernel", "launches", "seconds", "bytes", "flops"
            csv.writer(file, lineterminator="\n").writerows([columns, *found])


if __name__ == "__main__":
    main()
