"""Measure one GPU in a quarter of an hour, by two commands of one process each. Run this before anything else.

A machine took 35 s to start, and the first command 100 s, with all kernels in the cache.

    1. On the machine without a GPU, with the Python, PyTorch and Triton of the one that has it (here 3.12, 2.11, 3.6):

       nice -n 15 python3.12 benchmarks/gpu/quarter_hour.py --compile CACHE      # for sm_90; resumes where it stopped

       CACHE is an absolute path that both machines have: Triton's cache stores absolute paths, and compiles all again
       if it is moved. It holds kernels of all variants: below 64 MB. The same command again counts what CACHE does not
       have: nothing. Triton builds the C code that launches a kernel on the card, in 0.3 s for each of its signatures.
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
       both commands in benchmarks/results, compress it (``xz -9e``), and make the page: ``--page FILE.jsonl.xz``.

Every result is a line of JSON, written at once. An item that fails or exceeds its time loses only what was left of it.
If the process itself hangs or the card no longer answers, it starts itself anew with the next item; if the process
ends, the same command goes on with the next item.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT / folder) for folder in ("benchmarks", "tests", "src")]

if TYPE_CHECKING:
    from gpu.items import Item, Sizes
    from gpu.record import Record, Row
    from gpu.timing import Bench

GRACE = 15.0
"""Seconds after its limit in which an item must end; then the process begins anew."""
INTERPRETED = 20.0
"""Factor of the limits where kernels are interpreted."""
LEAST = 5.0
"""Seconds that must be left to begin an item."""


class TimeLimit(BaseException):
    """An item took longer than its limit. No item that goes on after an error catches it."""


def run(items: Sequence[Item], record: Record, deadline: float, bench: Bench, restart: Callable[[], Any]) -> None:
    """Measure the items that this record does not have; ``deadline`` is on the clock ``time.time``.

    ``restart`` begins the process anew; it is called if an item does not end, or leaves a card that does not answer.
    """
    from gpu.record import Record

    before = Record(record.path)
    begun, done = ({row["item"] for row in before.rows(table)} for table in ("begun", "items"))
    for item in items:
        if item.name in begun - done:
            record.add(item.name, {"table": "items", "ended": "ended the process", "seconds": 0.0, "compiled": 0})
        elif item.name not in done:
            record.add(item.name, {"table": "begun"})
            _run(item, record, deadline - time.time(), bench, restart)


def _run(item: Item, record: Record, left: float, bench: Bench, restart: Callable[[], Any]) -> None:
    """Measure an item unless too little memory or time is left."""
    begun, compiled, limit = time.time(), list[str](), min(item.limit, left)

    def end(reason: str) -> None:
        seconds = time.time() - begun
        record.add(item.name, {"table": "items", "ended": reason, "seconds": seconds, "compiled": len(compiled)})
        print(f"{item.name}: {reason}, {seconds:.1f} s", flush=True)

    if item.needs > bench.memory:
        return end(f"needs a card with {item.needs / 1e9:.0f} GB; this one has {bench.memory / 1e9:.0f} GB")
    if left < LEAST:
        return end("no time was left")

    def hung() -> None:
        end(f"hung after {limit:.0f} s")
        signal.setitimer(signal.ITIMER_REAL, 0)  # a timer outlives the restart, and would end the new process
        restart()

    with misses(compiled), _watched(limit + GRACE, hung):
        reason, broken = _measured(item, limit, record), ""
        try:
            bench.settle()
        except Exception as error:
            broken = f"; the device does not answer: {str(error)[:100]}"
    end(reason + broken)
    if broken:
        restart()


def _measured(item: Item, limit: float, record: Record) -> str:
    """Add the results of an item; return how that ended."""
    from gpu.timing import why

    try:
        with _limited(limit):
            for result in item.results():
                record.add(item.name, result)
    except TimeLimit:
        return f"stopped after {limit:.0f} s"
    except Exception as error:
        return why(error)
    except BaseException as error:  # pytest and others exit
        traceback.print_exception(error)
        return f"failed, {type(error).__name__}"
    return "measured"


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
def _watched(seconds: float, hung: Callable[[], Any]) -> Iterator[None]:
    """Call ``hung`` on a thread if the context does not end: a call into the driver hears no signal."""
    timer = threading.Timer(seconds, hung)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def misses(found: list[str]) -> Iterator[None]:
    """Within the context, add the kernels that Triton compiles because its cache does not have them."""
    from triton import knobs

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found.extend([] if cache_hit else [src.name])

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", action="store_true", help="measure what decides")
    parser.add_argument("--second", action="store_true", help="measure the headline and the rest")
    parser.add_argument("--here", action="store_true", help="small shapes, on the CPU; alone, both commands")
    parser.add_argument("--compile", type=Path, metavar="CACHE", help="compile all kernels into this folder")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of a file of results beside it")
    parser.add_argument("--cache", type=Path, metavar="CACHE", help="Triton's cache, at the path where it was made")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go")
    parser.add_argument("--earlier", type=Path, nargs="+", default=[], metavar="FILE", help="results of other commands")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all items together")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="items whose names begin like this")
    parser.add_argument("--profile", help=argparse.SUPPRESS)  # what the card's profiler watches
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile or arguments.page or arguments.profile:
        return arguments
    if arguments.here and not (arguments.first or arguments.second):
        arguments.first = arguments.second = True
    if not (arguments.first or arguments.second):
        parser.error("one of --first, --second, --here, --compile and --page must say what to do")
    if arguments.out is None:
        parser.error("--out must name the folder of the results")
    return arguments


def _prepare(arguments: argparse.Namespace) -> None:
    """Set what Triton reads when it is imported."""
    cache = arguments.compile or arguments.cache
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache.resolve())
        os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    if arguments.here:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _sizes(here: bool) -> Sizes:
    import torch
    from gpu.items import of_a_card, of_this_machine
    from gpu.timing import Bench

    if not here:
        if not torch.cuda.is_available():
            sys.exit("A card must be there; PyTorch sees none. Without one, try --here.")
        return of_a_card(Bench(torch.device("cuda", 0), 15, 3))
    from kernels.interpreted.conftest import interpret_as_the_card_does
    from kernels.recording import take_kernels
    from pytest import MonkeyPatch

    patch = MonkeyPatch()
    interpret_as_the_card_does(patch)
    take_kernels(patch)
    torch.set_num_threads(1)
    return of_this_machine(Bench(torch.device("cpu")))


def _facts(bench: Bench) -> Row:
    import triton

    from gecko.train.throughput import describe_hardware

    found = describe_hardware(bench.device)
    found["Software"] += f", Triton {triton.__version__}"
    command = shlex.join(["python", "benchmarks/gpu/quarter_hour.py", *sys.argv[1:]])
    hardware = "; ".join([found.pop("GPU", "CPU"), *found.values()])
    counts = {"repeats": bench.repeats, "warm_ups": bench.warm_ups}
    return {"table": "facts", "command": command, "hardware": hardware, **counts}


def write_page(record: Record) -> Path:
    from gpu.page import page

    path = record.path.with_name(f"{record.path.name.partition('.jsonl')[0]}.md")
    path.write_text("\n".join(page(record)) + "\n", encoding="utf-8")
    return path


def main() -> None:
    arguments = parse()
    _prepare(arguments)
    if arguments.page:
        from gpu.record import Record

        print(write_page(Record(arguments.page, arguments.earlier)))
    elif arguments.compile:
        from gpu.beforehand import compile_all

        compile_all(arguments.only)
    elif arguments.profile:
        from gpu.items import profiled

        profiled(_sizes(arguments.here), arguments.profile)
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Measure the items of the commands that are asked for, and write their page."""
    import torch
    from gpu.items import first, second
    from gpu.record import Record

    sizes = _sizes(arguments.here)
    card = "here" if arguments.here else re.sub(r"\W+", "_", torch.cuda.get_device_name(sizes.bench.device).lower())
    record = Record(arguments.out / f"{card}.jsonl", arguments.earlier)
    until = arguments.until or time.time() + 60 * arguments.minutes
    if arguments.until is None:
        facts = _facts(sizes.bench)
        record.add(facts["command"], facts)

    def restart() -> None:
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:], "--until", str(until)])

    items = [*(first(sizes, record) if arguments.first else []), *(second(sizes, record) if arguments.second else [])]
    slower = INTERPRETED if arguments.here else 1.0
    chosen = {  # rates are in both commands
        x.name: dataclasses.replace(x, limit=slower * x.limit)
        for x in items
        if x.name.startswith(tuple(arguments.only))
    }
    run(list(chosen.values()), record, until, sizes.bench, restart)
    print(write_page(record).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
