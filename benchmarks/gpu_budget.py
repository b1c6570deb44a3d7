"""What the kernels can reach on an H200, predicted from their compiled code. No GPU is needed.

    python benchmarks/gpu_budget.py --write           # writes gpu_budget.md and gpu_budget.json in benchmarks/results
    python benchmarks/gpu_budget.py --steps --write   # gpu_budget.json only, with the kernels of a training step

Every launch of every operator is recorded at the shapes of models, compiled for sm_90 and disassembled.
``launch_costs.py`` has the arithmetic.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from gpu.operators import MIXING, Operator, Shape, forward_and_backward, operators
from gpu.page import PREDICTIONS
from gpu.timing import Bench
from kernels.recording import launches, model_on_nothing
from launch_costs import COPY, PRODUCTS, Cost, costs, merged
from measuring import parser_of, publish

from gecko.config import GeckoConfig
from gecko.train.step import autocast

LENGTH = 32_768
LEFT_OUT = ("head and loss",)
"""Operators whose time is in products of cuBLAS."""


@dataclass(frozen=True)
class Prediction:
    """All launches of a kernel in a step: what they need, and their time."""

    kernel: str
    launches: int
    seconds: float
    bytes: float
    flops: float
    instructions: float
    limit: str


def predicted(shape: Shape) -> Iterator[tuple[Operator, list[Cost], list[Cost]]]:
    """Yield each operator with the costs of its forward pass alone, and of both passes."""
    bench = Bench(torch.device("cpu"))
    found: list[Operator] = []
    launches(lambda: found.extend(operators(shape, bench)), lambda _: None)
    for operator in found:
        if operator.name not in LEFT_OUT:
            yield operator, costs(lambda op=operator: _forward(op)), costs(lambda op=operator: forward_and_backward(op))


def _forward(operator: Operator) -> None:
    with torch.no_grad():
        operator.function(*operator.inputs)


def share(operator: Operator, found: list[Cost], numbers: float, flops: float) -> tuple[float, str]:
    """Return the floor of time as a share of the predicted time, and what the floor is."""
    seconds = sum(cost.seconds for cost in found)
    if operator.name == MIXING or operator.name in ("chunk attention", "working memory"):
        return flops / PRODUCTS / seconds, "products"
    return 2 * numbers / COPY / seconds, "bytes"


def summary(results: list[tuple[Operator, list[Cost], list[Cost]]]) -> Iterator[str]:
    """Yield a row per operator."""
    for operator, forward, both in results:
        floor = operator.floor
        ahead, of = share(operator, forward, floor.numbers_forward, floor.flops_forward)
        whole, _ = share(operator, both, floor.numbers_both, floor.flops_both)
        counts = " / ".join(str(len(found)) for found in (forward, both))
        times = " / ".join(f"{1e3 * sum(cost.seconds for cost in found):.3f}" for found in (forward, both))
        moved = " / ".join(
            f"{sum(cost.bytes for cost in found) / 2 / numbers:.2f}"
            for found, numbers in ((forward, floor.numbers_forward), (both, floor.numbers_both))
        )
        yield f"| {operator.name} | {counts} | {times} | {moved} | {ahead:.0%} / {whole:.0%} of {of} |"


def table(operator: Operator, both: list[Cost], elements: float) -> Iterator[str]:
    """Yield a row per kernel of an operator."""
    for count, cost in merged(both):
        yield (
            f"| {operator.name} | {cost.name} | {count} | {cost.bytes / 1e6:,.1f} | {cost.bytes / elements:.2f} "
            f"| {32 * cost.instructions / elements:.1f} | {cost.flops / 1e9:,.0f} | {cost.warps} | {cost.registers} "
            f"| {cost.resident} | {cost.waves:.1f} | {cost.in_flight / 1e3:.0f} | {1e6 * cost.seconds:.0f} "
            f"| {cost.limit} |"
        )


def steps(names: list[str]) -> dict[str, list[Prediction]]:
    """Return what each kernel needs in a training step of one block and the head of each preset."""
    found = {}
    for preset in names:
        by_name: dict[str, list[Cost]] = {}
        for cost in costs(_step(GeckoConfig.preset(preset))):
            by_name.setdefault(cost.name, []).append(cost)
        found[f"{preset}, {LENGTH:,} tokens"] = [_prediction(name, group) for name, group in by_name.items()]
    return found


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


def _prediction(name: str, group: list[Cost]) -> Prediction:
    sums = {
        field: sum(getattr(cost, field) for cost in group) for field in ("seconds", "bytes", "flops", "instructions")
    }
    return Prediction(name, len(group), **sums, limit=max(group, key=lambda cost: cost.seconds).limit)


def section(name: str) -> list[str]:
    """Return both tables of one preset."""
    config = GeckoConfig.preset(name)
    results = list(predicted(Shape(name, config, LENGTH)))
    elements = LENGTH * config.model_dim
    rows = [row for operator, _, both in results if operator.name != MIXING for row in table(operator, both, elements)]
    return [
        f"## {name}", "",
        "| operator | launches forward / both | predicted ms | bytes, of the floor's | share of the limit |",
        "|---|---|---:|---:|---|", *summary(results), "",
        "| operator | kernel | launches | MB | bytes/element | instructions/element | GFLOP | warps | registers "
        "| programs/SM | waves | KB in flight/SM | µs | limit |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|", *rows, "",
    ]  # fmt: skip


def page(names: list[str]) -> list[str]:
    return [
        "# Budget of the kernels on an H200", "",
        f"**A prediction, not a measurement: no GPU was at hand.** One row of {LENGTH:,} tokens, bfloat16. Every "
        "launch is compiled for sm_90; bytes are those of its tensors, instructions and tensor-core products those of "
        "its machine code. An element is one of the model's features of one token; instructions are per thread. The "
        "limit is what the predicted time is made of. `benchmarks/launch_costs.py` has rates and arithmetic.", "",
        *(line for name in names for line in section(name)),
        f"Written by `python benchmarks/gpu_budget.py --models {' '.join(names)} --write`.",
    ]  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["gecko-1b", "gecko-7b"], metavar="PRESET")
    parser.add_argument("--steps", action="store_true", help="only training steps, for the table of kernels of a card")
    arguments = parser.parse_args()
    if not arguments.steps:
        publish("gpu_budget.md", page(arguments.models), arguments.write)
    found = steps(arguments.models)
    for step, kernels in found.items():
        print(f"{step}: {1e3 * sum(kernel.seconds for kernel in kernels):.2f} ms predicted")
    if arguments.write:
        content = {step: list(map(asdict, kernels)) for step, kernels in found.items()}
        PREDICTIONS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
