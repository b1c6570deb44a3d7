"""Operators, training steps, prefill and decoding on a GPU, compared with their floors and peers.

    python benchmarks/operators.py                             # all parts, into benchmarks/results/<card>.md
    python benchmarks/operators.py --only operators:gecko-7b activations --minutes 9 --out FOLDER
    python benchmarks/operators.py --small                     # small shapes: checks that it runs, on a CPU too

Every part runs in a separate process, and every result is saved to ``<card>.json`` at once. The page is made from this
file; another command on the same card and folder adds its parts to both. The page lists what crashed, hung, did not fit
into memory, is not installed, or was not reached in time, with the reason. Without a GPU the page is ``gpu.md``, which
says that the targets are open.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import math
import os
import re
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
from gpu.page import open_targets, page
from gpu.parts import RATES, Part, full, measure, small
from gpu.processes import Runner
from gpu.record import Record
from gpu.timing import Bench
from measuring import RESULTS

from gecko.io.files import whole_file
from gecko.ops.backends.dispatch import triton_kernels_installed
from gecko.train.throughput import describe_hardware, select_device


def chosen(parts: dict[str, Part], only: list[str]) -> list[str]:
    """Return the selected parts in the order of ``parts``; a name is a whole name or the part of it before the colon.

    Raises:
        ValueError: a name matches no part.
    """
    for name in only:
        if not any(_names(name, part) for part in parts):
            raise ValueError(f"--only must name parts of {', '.join(parts)}; got {name!r}.")
    if not only:
        return [name for name, part in parts.items() if not part.asked]
    return [part for part in parts if any(_names(name, part) for name in only)]


def _names(name: str, part: str) -> bool:
    return name in (part, part.partition(":")[0])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"of: {', '.join(full())}")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where page and results go")
    parser.add_argument(
        "--earlier", type=Path, metavar="FOLDER",
        help="folder with results of earlier commands on such a card, which are taken over",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all parts together")
    parser.add_argument("--small", action="store_true", help="small shapes, two calls each; give another --out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls")
    parser.add_argument("--here", action="store_true", help="measure one part in this very process; for debuggers")
    arguments = parser.parse_args()
    if arguments.small and arguments.out == RESULTS:
        parser.error("--small is no measurement: give it another --out")
    if select_device(arguments.device).type == "cuda" and not triton_kernels_installed():
        parser.error("operators would take their eager forms: Triton is not installed")
    try:
        arguments.only = chosen(small() if arguments.small else full(), arguments.only)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def write(path: Path, lines: list[str]) -> None:
    with whole_file(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_page(record: Record) -> None:
    """Write the page. An error is printed and does not end the measurement: the results are saved anyway."""
    try:
        write(record.path.with_suffix(".md"), page(record))
    except Exception as error:
        traceback.print_exception(error)


def measure_all(names: list[str], parts: dict[str, Part], bench: Bench, record: Record, minutes: float) -> None:
    """Run each part in its own process; the rates that others are compared with come first, once per card."""
    own = [*sys.argv[1:], "--here", "--only"]
    runner = Runner(
        record, lambda part: [sys.executable, __file__, *own, part], list(parts),
        lambda: write_page(record), time.monotonic() + 60 * minutes,
    )  # fmt: skip
    known = record.parts().get(RATES) == "" and not any(record.tasks(RATES).values())
    for name in names if known else dict.fromkeys([RATES, *names]):
        reason = parts[name].refused(bench)
        print(f"--- {name}" + (f": {reason}" if reason else ""), flush=True)
        if reason:
            record.refuse(name, parts, reason)
        else:
            runner.run(name)
    write_page(record)


def measure_here(parts: dict[str, Part], bench: Bench, record: Record) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # to print its stacks before it is killed
    record.compilations.note()
    if bench.device.type == "cuda":
        torch.cuda.set_device(bench.device.index or 0)  # events belong to the current device
    try:
        for name, part in parts.items():
            measure(name, part, bench, record)
    except Exception as error:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)  # a normal exit may wait for a card that no longer responds


def take_over_earlier(folder: Path | None, record: Record) -> None:
    """Take over what earlier commands measured on such a card, if there is any."""
    earlier = folder / record.path.name if folder else record.path
    if earlier.exists() and earlier.resolve() != record.path.resolve():
        record.take_over(earlier)


def describe(device: torch.device) -> tuple[str, str]:
    """Return the name of the card for file names, and a description of the machine."""
    facts = describe_hardware(device)
    if triton_kernels_installed():
        facts["Software"] += f", Triton {importlib.metadata.version('triton')}"
    hardware = "; ".join([facts.pop("GPU", "CPU"), *facts.values()])
    return re.sub(r"\W+", "_", re.split("[,;]", hardware)[0].lower()), hardware


def main() -> None:
    arguments = parse()
    device = select_device(arguments.device)
    if device.type != "cuda" and not arguments.small:
        write(arguments.out / "gpu.md", open_targets("make bench-gpu"))
        return
    parts = small() if arguments.small else full()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name, hardware = describe(device)
    record = Record(arguments.out / f"{name}.json")
    bench = Bench(device, dtype, *((2, 1) if arguments.small else (arguments.repeats, 5)), record.compilations)
    if arguments.here:
        measure_here({name: parts[name] for name in arguments.only}, bench, record)
        return
    record.describe(
        shlex.join(["python", "benchmarks/operators.py", *sys.argv[1:]]), hardware=hardware,
        dtype=str(dtype).removeprefix("torch."), repeats=bench.repeats, warm_ups=bench.warm_ups,
    )  # fmt: skip
    take_over_earlier(arguments.earlier, record)
    measure_all(arguments.only, parts, bench, record, arguments.minutes)
    print("\n".join(page(record)))


if __name__ == "__main__":
    main()
