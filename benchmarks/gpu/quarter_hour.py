"""Measure one GPU in a quarter of an hour, by two commands of one process each. Run this before anything else.

    1. On the machine without a GPU, with the Python, PyTorch and Triton of the one that has it (here 3.12, 2.11, 3.6):

       nice -n 15 python3.12 benchmarks/gpu/quarter_hour.py --compile CACHE      # for sm_90; resumes where it stopped

       CACHE is an absolute path that both machines have: Triton's cache stores absolute paths, and compiles all again
       if it is moved. It holds kernels of all variants and the C code that launches them: below 64 MB.
       ``--check CACHE`` looks all of them up again and compiles nothing.
    2. Try everything on small shapes on the CPU, in Triton's interpreter: nothing is run on a card for the first time.

       python benchmarks/gpu/quarter_hour.py --here --out FOLDER

    3. Copy the repository and CACHE to the machine with the card, and run there, with OUT an empty folder:

       PYTHONPATH=src python3 benchmarks/gpu/quarter_hour.py --first --cache CACHE --out OUT --minutes 5.5
       PYTHONPATH=src python3 benchmarks/gpu/quarter_hour.py --second --cache CACHE --out OUT --earlier FIRST.jsonl \\
           --minutes 7

       If CACHE arrives elsewhere, first copy it to its path. The second command needs the lines of the first one
       (``<card>.jsonl``): variants that won there are applied in its headline.
    4. Read the tables in OUT/<card>.md: "Items" (what did not run, and whether kernels were compiled meanwhile, as the
       cache was not found), "Other numbers" (equal rows), "Variants of kernels", "Targets". Join ``<card>.jsonl`` of
       both commands in benchmarks/results, and make the page there: ``--page FILE.jsonl``.

Every result is a line of JSON, written at once. An item that fails or exceeds its time loses only what was left of it.
If the process itself hangs or the card no longer answers, it starts itself anew with the next item.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT / folder) for folder in ("benchmarks", "tests", "src")]

if TYPE_CHECKING:
    from gpu.items import Item, Sizes
    from gpu.record import Record

GRACE = 15.0
"""Seconds after its limit in which an item must end; then the process begins anew."""
INTERPRETED = 20.0
"""Factor of the limits where kernels are interpreted."""
LEAST = 5.0
"""Seconds that must be left to begin an item."""


class TimeLimit(BaseException):
    """An item took longer than its limit. No item that goes on after an error catches it."""


def run(items: Sequence[Item], record: Record, deadline: float, memory: float, restart: Any) -> None:
    """Measure the items that this record does not have; ``deadline`` is on the clock ``time.time``.

    ``restart`` begins the process anew; it is called if an item does not end, or leaves a card that does not answer.
    """
    from gpu.record import Ended

    done = record.ended()
    for item in (item for item in items if item.name not in done):
        left, begun, compiled = deadline - time.time(), time.time(), Misses()
        limit = min(item.limit, left)

        def end(reason: str, item: Item = item, begun: float = begun, compiled: Misses = compiled) -> None:
            record.end(Ended(item.name, reason, time.time() - begun, compiled.count))
            print(f"{item.name}: {reason or 'measured'}, {time.time() - begun:.1f} s", flush=True)

        if item.needs > memory:
            end(f"needs a card with {item.needs / 1e9:.0f} GB; this one has {memory / 1e9:.0f} GB")
        elif left < LEAST:
            end("no time was left")
        else:
            with _watched(limit + GRACE, lambda end=end, limit=limit: (end(f"hung after {limit:.0f} s"), restart())):
                reason, answers = _measured(item, limit, record, compiled)
            end(reason)
            if not answers:
                restart()


def _measured(item: Item, limit: float, record: Record, compiled: Misses) -> tuple[str, bool]:
    """Add the results of an item; return why it failed, or "", and whether the device still answers."""
    from gpu.timing import why

    reason = ""
    with compiled:
        try:
            with _limited(limit):
                for result in item.results():
                    record.add(item.name, result)
        except TimeLimit:
            reason = f"stopped after {limit:.0f} s"
        except Exception as error:
            reason = why(error)
        except BaseException as error:  # pytest and others exit
            traceback.print_exception(error)
            reason = f"failed, {type(error).__name__}"
        try:
            _finish()
        except Exception as error:
            return f"{reason or 'failed'}; the device does not answer: {str(error)[:100]}", False
    return reason, True


def _finish() -> None:
    """Wait for the device and free memory."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _watched(seconds: float, hung: Any) -> Iterator[None]:
    """Call ``hung`` on a thread if the context does not end: a call into the driver hears no signal."""
    timer = threading.Timer(seconds, hung)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Misses:
    """Counts kernels that Triton compiles in a context because its cache does not have them."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Misses:
        from triton import knobs

        knobs.compilation.listener = self._listen
        return self

    def __exit__(self, *_: object) -> None:
        from triton import knobs

        knobs.compilation.listener = None

    def _listen(self, *, cache_hit: bool, **_: Any) -> None:
        self.count += not cache_hit


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--first", action="store_true", help="measure what decides")
    what.add_argument("--second", action="store_true", help="measure the headline and the rest")
    what.add_argument("--compile", type=Path, metavar="CACHE", help="compile all kernels into this folder")
    what.add_argument("--check", type=Path, metavar="CACHE", help="count the kernels that this folder does not have")
    what.add_argument("--page", type=Path, metavar="FILE", help="write the page of a file of results beside it")
    what.add_argument("--profile", help=argparse.SUPPRESS)  # what the card's profiler watches
    parser.add_argument("--here", action="store_true", help="small shapes, on the CPU; alone, both commands")
    parser.add_argument("--cache", type=Path, metavar="CACHE", help="Triton's cache, at the path where it was made")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go")
    parser.add_argument("--earlier", type=Path, nargs="+", default=[], metavar="FILE", help="results of other commands")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all items together")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="items or groups with this in their names"
    )
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = sys.argv[1:]
    if "--here" in given and not {"--first", "--second", "--profile"} & set(given):
        given = ["--first", *given]
        parser.set_defaults(both=True)
    arguments = parser.parse_args(given, argparse.Namespace(both="--first" not in sys.argv[1:] and "--here" in given))
    if (arguments.first or arguments.second) and arguments.out is None:
        parser.error("--out must name the folder of the results")
    return arguments


def _prepare(arguments: argparse.Namespace) -> None:
    """Set what Triton reads when it is imported."""
    cache = arguments.compile or arguments.check or arguments.cache
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache.resolve())
        os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    if arguments.here:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _sizes(arguments: argparse.Namespace) -> Sizes:
    import torch
    from gpu.items import of_a_card, of_this_machine
    from gpu.timing import Bench

    if not arguments.here:
        if not torch.cuda.is_available():
            sys.exit("A card must be there; PyTorch sees none. Without one, try --here.")
        return of_a_card(Bench(torch.device("cuda", 0), torch.bfloat16, 15, 3))
    from kernels.interpreted.conftest import interpret_as_the_card_does
    from kernels.recording import take_kernels
    from pytest import MonkeyPatch

    patch = MonkeyPatch()
    interpret_as_the_card_does(patch)
    take_kernels(patch)
    torch.set_num_threads(1)
    return of_this_machine(Bench(torch.device("cpu"), torch.bfloat16, 1, 1))


def describe(record: Record, sizes: Sizes) -> None:
    from gecko.ops.backends.dispatch import triton_kernels_installed
    from gecko.train.throughput import describe_hardware

    facts = describe_hardware(sizes.bench.device)
    assert triton_kernels_installed()
    import triton

    facts["Software"] += f", Triton {triton.__version__}"
    record.describe(
        command=shlex.join(["python", "benchmarks/gpu/quarter_hour.py", *sys.argv[1:]]),
        hardware="; ".join([facts.pop("GPU", "CPU"), *facts.values()]),
        dtype=str(sizes.bench.dtype).removeprefix("torch."), repeats=sizes.bench.repeats,
        warm_ups=sizes.bench.warm_ups,
    )  # fmt: skip


def card_name(sizes: Sizes) -> str:
    """Return the name of the card for files."""
    import torch

    name = torch.cuda.get_device_name(sizes.bench.device) if sizes.bench.device.type == "cuda" else "here"
    return re.sub(r"\W+", "_", name.lower())


def write_page(record: Record) -> Path:
    from gpu.page import page

    path = record.path.with_suffix(".md")
    path.write_text("\n".join(page(record)) + "\n", encoding="utf-8")
    return path


def main() -> None:
    arguments = parse()
    _prepare(arguments)
    from gpu.record import Record

    if arguments.page is not None:
        print(write_page(Record(arguments.page, arguments.earlier)))
        return
    if arguments.compile or arguments.check:
        from gpu.beforehand import compile_all

        sys.exit(compile_all(arguments.only, check=arguments.check is not None))
    sizes = _sizes(arguments)
    from gpu.items import first, profiled, second

    if arguments.profile:
        profiled(sizes, arguments.profile)
        return
    record = Record(arguments.out / f"{card_name(sizes)}.jsonl", arguments.earlier)
    until = arguments.until or time.time() + 60 * arguments.minutes
    if arguments.until is None:
        describe(record, sizes)

    def restart() -> None:
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:], "--until", str(until)])

    items = first(sizes, record) if arguments.first else second(sizes, record)
    if arguments.both:
        items += second(sizes, record)[1:]
    if arguments.here:
        items = [dataclasses.replace(x, limit=INTERPRETED * x.limit) for x in items]
    chosen = [x for x in items if not arguments.only or any(word in x.name for word in arguments.only)]
    run(chosen, record, until, sizes.bench.memory, restart)
    print(write_page(record).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
