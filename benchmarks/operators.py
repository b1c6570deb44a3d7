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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu import activations
from gpu.operators import measure_compiled, measure_forms, operators
from gpu.page import open_targets, page
from gpu.peers import peers
from gpu.reading import positions
from gpu.shapes import Shape
from gpu.targets import LENGTHS, MODEL, SHAPE, Results
from gpu.timing import Bench, Rates, why
from gpu.training import trainings
from measuring import publish, put

from gecko.config import GeckoConfig
from gecko.ops.kernels import kernels_installed
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
        {MODEL: lengths, "gecko-125m": lengths}, {"gecko-125m": far, MODEL: far}, 2**29, 8_192, True,
    )  # fmt: skip


def small() -> Plan:
    tiny = GeckoConfig.preset("tiny")
    return Plan(
        [Shape("tiny", tiny, 512)], ("tiny", 512), {"tiny": [256, 512]}, {"tiny": [256, 1_024]}, 2**22, 512, False
    )


def measured(plan: Plan, bench: Bench) -> Iterator[Results]:
    """Run it all, saying what is at hand as it goes: the results after each part, the last of which takes longest."""
    results = Results(
        Rates.measure(bench, plan.copied, plan.multiplied), peak_flops(bench.device, bench.dtype), bench.dtype.itemsize
    )
    for shape in plan.shapes:
        for operator in operators(shape, bench):
            _add(results.timings, measure_forms(operator, shape.name, bench))
        _add(results.timings, peers(shape, bench))
        yield results
    found = activations.measure(*plan.activations, bench)
    _add(results.activations, [] if found is None else [found])
    for name, lengths in plan.trainings.items():
        _add(results.trainings, trainings(name, GeckoConfig.preset(name), lengths, bench))
        yield results
    for name, wanted in plan.positions.items():
        _add(results.positions, positions(name, GeckoConfig.preset(name), wanted, bench))
    yield results
    if plan.compiled:
        # Compiling takes minutes a shape: the first one's will do.
        shape = plan.shapes[0]
        _add(results.timings, (measure_compiled(operator, shape.name, bench) for operator in operators(shape, bench)))
        yield results


def _add(into: list[Any], found: Iterable[Any]) -> None:
    try:
        for one in found:
            into.append(one)
            print(one, flush=True)
    except Exception as error:
        print(why(error), flush=True)


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
    if device.type == "cuda":
        if not kernels_installed():
            parser.error("operators would take their eager forms: Triton is not installed")
        torch.cuda.set_device(device.index or 0)  # events are the current device's
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = Bench(device, dtype, *((2, 1) if arguments.small else (arguments.repeats, 5)))
    facts = describe_hardware(device)
    hardware = "; ".join([facts.pop("GPU", "CPU"), *facts.values()])
    name = re.sub(r"\W+", "_", hardware.partition(",")[0].lower()) + ".md"
    write = arguments.write and not arguments.small
    for results in measured(small() if arguments.small else full(), bench):
        if write:  # after each part, for what comes after it may be cut short
            put(name, page(results, bench, hardware, command))
    publish(name, page(results, bench, hardware, command), write)


if __name__ == "__main__":
    main()
