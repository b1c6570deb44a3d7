"""What benchmarks share: their options, models and texts, clocks, memory, a served model, and the pages of results."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor, nn

import gecko
from gecko.data.sources import stdlib_files
from gecko.runtime.process import processor_name
from gecko.train import Run, latest_checkpoint, train
from gecko.train.throughput import describe_hardware

BLOCK = 1 << 14
RESULTS = Path(__file__).parent / "results"
DEMO = "runs/demo"
START = torch.tensor([256])
"""Token that starts a document of bytes."""
T = TypeVar("T")

# Options


def parser_of(
    doc: str | None, *, threads: bool | int = False, write: bool = True, **options: tuple[Any, str]
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark.

    Args:
        threads: whether it has ``--threads``, or the default; that of True is PyTorch's.
        write: whether it can write a page.
        options: default and help by name. Values are of the default's type, texts without one; a list has several.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if write:
        parser.add_argument("--write", action="store_true", help="put the page into benchmarks/results")
    if threads:
        options["threads"] = (torch.get_num_threads() if threads is True else threads, "of PyTorch")
    for name, (default, text) in options.items():
        several = isinstance(default, list | tuple)
        kind = str if default in (None, []) else type(default[0] if several else default)
        nargs = "*" if several else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text, nargs=nargs)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments; PyTorch has their number of threads from now on."""
    given = parser.parse_args()
    given.flags = {action.dest: action.option_strings[-1:] for action in parser._actions}
    if "threads" in given:
        torch.set_num_threads(given.threads)
    return given


def command(given: argparse.Namespace) -> str:
    """Return the command with the values of all its options; of files, only their names."""
    parts = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    for name, flag in given.flags.items():
        if (value := getattr(given, name, None)) not in (None, False, "", []):
            values = value if isinstance(value, list | tuple) else [value] if value is not True else []
            parts += [*flag, *(Path(one).name if "/" in str(one) else str(one) for one in values)]
    return shlex.join(parts)


# Models and texts


def find_model(name: str) -> Path:
    """Return a model's folder, or the newest checkpoint of a run."""
    checkpoints = Path(name) / "checkpoints"
    newest = latest_checkpoint(checkpoints) if checkpoints.is_dir() else Path(name)
    if newest is None:
        raise FileNotFoundError(f"{checkpoints} must hold a checkpoint; it has none: gecko train tiny --out {name}")
    return newest


def trained_loss(run: Run) -> float:
    """Return the held-out loss of a run in nats per byte; train it if that was not done."""
    results = run.folder / "results.json"
    if not results.is_file() and not train(run, resume=True).finished:
        raise SystemExit("stopped; the same command continues")
    return json.loads(results.read_text(encoding="utf-8"))["nats_per_byte"]


def size_of(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def reading_parser(doc: str | None, **options: tuple[Any, str]) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that reads texts with a trained model."""
    parser = parser_of(doc, threads=True, model=(DEMO, "a model's folder, or a run's"), **options)
    parser.add_argument("texts", nargs="*", help="files to read as bytes, over and over if they are short")
    return parser


def model_and_texts(given: argparse.Namespace) -> tuple[gecko.Gecko, list[Path], str]:
    """Return the model, the files or else the source of Python's standard library, and sentences about both."""
    folder, files = find_model(given.model), [Path(name) for name in given.texts] or stdlib_files()
    model = gecko.load(folder)
    return model, files, described(model, folder, files)


def byte_tokens(files: Sequence[Path], length: int) -> Iterator[Tensor]:
    """Yield the first ``length`` bytes of the repeated files, as ids in small parts."""
    for path in cycle(files):
        with path.open("rb") as file:
            while length > 0 and (content := file.read(min(BLOCK, length))):
                length -= len(content)
                yield torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
        if length == 0:
            return


def described(model: nn.Module, name: str | Path, text: str | Sequence[Path] = "") -> str:
    """Return sentences about a model and the text that it reads."""
    if not isinstance(text, str):
        text = "the source of Python's standard library" if len(text) > 20 else ", ".join(path.name for path in text)
    name = "/".join(name.parts[-3:]) if isinstance(name, Path) else name
    return f"Model: {name}, {size_of(model):,} parameters, float32." + f" Text: {text}." * bool(text)


# Clocks and memory


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    work()
    return clock() - begin


def median_seconds(
    work: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter, warm_ups: int = 0
) -> float:
    for _ in range(warm_ups):
        work()
    return statistics.median(seconds_of(work, clock) for _ in range(rounds))


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return what each way returned in each round, so that a slow minute of the machine slows all of them."""
    turns = [{name: way() for name, way in ways.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in ways}


def resident() -> int:
    """Return the memory in use, in bytes, without free memory that the C library keeps."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def peak() -> int:
    """Return the largest memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def serving(folder: Path, *options: str, threads: int = 1) -> Iterator[tuple[psutil.Popen, int]]:
    """Serve the model in ``folder``; yield the process, which is killed at the end, and its port."""
    command = [sys.executable, "-m", "gecko", "serve", str(folder), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        found = re.search(r"http://\S+:(\d+)", process.stdout.readline())
        if found is None:
            raise RuntimeError("the server did not start: run `gecko serve` by hand to see why")
        yield process, int(found[1])
    finally:
        with suppress(psutil.NoSuchProcess):  # it may have ended
            process.kill()
        process.wait()


def settled_numbers(port: int, seconds: float = 10) -> dict[str, float]:
    """Return the server's metrics once it is idle, or after some seconds."""
    for _ in range(round(10 * seconds)):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            lines = response.read().decode().splitlines()
        numbers = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
        if numbers["gecko_rows_active"] + numbers["gecko_queue_length"] == 0:
            break
        time.sleep(0.1)
    return numbers


# Pages


def machine() -> str:
    """Describe the processor, the memory and the software."""
    return "; ".join(describe_hardware(torch.device("cpu")).values())


def of_processor(name: str) -> str:
    """Return ``name`` with the name of this processor, because timings of each processor are a separate page."""
    processor = re.sub(r"\((r|tm)\)|\b(processor|cpu)\b|@.*", " ", processor_name().lower())
    return "_".join([name, *re.findall(r"[a-z0-9.]+", processor)]) + ".md"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table.

    Args:
        columns: names, those of numbers with a format such as ``speed|,.0f``; their cells stand at the right.
        rows: texts as they are shown, numbers, and None for an empty cell.
    """
    names, forms = zip(*((name, form) for name, _, form in (column.partition("|") for column in columns)), strict=True)

    def cell(value: object, form: str) -> str:
        return "" if value is None else value if isinstance(value, str) else format(value, form)

    return "\n".join([
        f"| {' | '.join(names)} |", f"|{'|'.join('---:' if form else '---' for form in forms)}|",
        *(f"| {' | '.join(map(cell, row, forms))} |" for row in rows),
    ])  # fmt: skip


def publish(name: str, given: argparse.Namespace, title: str, about: str, *parts: str) -> None:
    """Print a page with date, machine and command; with ``--write`` put it into the folder of results.

    Args:
        about: what belongs to the machine, such as the model.
        parts: paragraphs, headings and tables.
    """
    busy = f"Load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores when this was written."
    head = f"{date.today()}, {machine()}. {f'{about} {busy}'.strip()} Command: `{command(given)}`."
    page = "\n\n".join([f"# {title}", head, *parts]) + "\n"
    print(page)
    if given.write:
        (RESULTS / name).write_text(page, encoding="utf-8")
