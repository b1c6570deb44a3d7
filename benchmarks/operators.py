"""Operators, training steps, reading and decoding on the GPU that is there, beside their floors and peers.

    python benchmarks/operators.py --write           # writes benchmarks/results/<card>.md
    python benchmarks/operators.py --small           # small shapes: that it runs to its end, on a CPU too

Without a GPU ``--write`` writes ``results/gpu.md``, which says that the targets are open. What does not fit into the
memory, or is not installed, is left out with a line that says so.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from gpu import activations
from gpu.operators import measure_forms, operators
from gpu.page import open_targets, page
from gpu.peers import peers
from gpu.reading import positions
from gpu.shapes import Shape
from gpu.targets import LENGTHS, MODEL, SHAPE, Results
from gpu.timing import Bench, Rates
from gpu.training import trainings
from measuring import publish

from gecko.config import GeckoConfig
from gecko.train.hardware import describe_hardware, select_device
from gecko.train.utilisation import peak_flops


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    shapes: list[Shape]
    activations: tuple[str, int]
    """Preset, and tokens."""
    trainings: dict[str, list[int]]
    """Tokens a row by preset."""
    positions: dict[str, list[int]]
    copied: int
    """Numbers in the copy that bandwidth is measured by."""
    multiplied: int
    """Side of the matrices that the matrix rate is measured by."""
    compiled: bool


def full() -> Plan:
    lengths = list(LENGTHS)
    far = [1_000, 10_000, 100_000, 1_000_000]
    return Plan(
        [Shape(name, GeckoConfig.preset(name), 32_768) for name in (SHAPE, MODEL, "gecko-125m")], (SHAPE, 32_768),
        {"gecko-125m": lengths, MODEL: lengths}, {"gecko-125m": far, MODEL: far}, 2**29, 8_192, True,
    )  # fmt: skip


def small() -> Plan:
    tiny = GeckoConfig.preset("tiny")
    return Plan(
        [Shape("tiny", tiny, 512)], ("tiny", 512), {"tiny": [256, 512]}, {"tiny": [256, 1_024]}, 2**22, 512, False
    )


def measured(plan: Plan, bench: Bench) -> Results:
    """Run it all, saying what is at hand as it goes."""
    results = Results(
        Rates.measure(bench, plan.copied, plan.multiplied), peak_flops(bench.device, bench.dtype), bench.dtype.itemsize
    )
    for shape in plan.shapes:
        for operator in operators(shape, bench):
            # Compiling takes minutes a shape: the first one's will do.
            compiled = plan.compiled and shape is plan.shapes[0]
            _add(results.timings, measure_forms(operator, shape.name, bench, compiled=compiled))
        _add(results.timings, peers(shape, bench))
    found = activations.measure(*plan.activations, bench)
    _add(results.activations, [] if found is None else [found])
    for name, lengths in plan.trainings.items():
        _add(results.trainings, trainings(name, GeckoConfig.preset(name), lengths, bench))
    for name, wanted in plan.positions.items():
        _add(results.positions, positions(name, GeckoConfig.preset(name), wanted, bench))
    return results


def _add(into: list[Any], found: Iterable[Any]) -> None:
    for one in found:
        into.append(one)
        print(one, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small shapes, two calls each; results are only printed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls")
    parser.add_argument("--write", action="store_true", help="write a page into benchmarks/results")
    arguments = parser.parse_args()
    device = select_device(arguments.device)
    command = shlex.join(["python", "benchmarks/operators.py", *sys.argv[1:]])
    if device.type != "cuda" and not arguments.small:
        publish("gpu.md", open_targets("make bench-gpu"), arguments.write)
        return
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = Bench(device, dtype, *((2, 1) if arguments.small else (arguments.repeats, 5)))
    results = measured(small() if arguments.small else full(), bench)
    facts = describe_hardware(device)
    hardware = "; ".join([facts.pop("GPU", "CPU"), *facts.values()])
    card = re.sub(r"\W+", "_", hardware.partition(",")[0].lower())
    publish(f"{card}.md", page(results, bench, hardware, command), arguments.write and not arguments.small)


if __name__ == "__main__":
    main()
