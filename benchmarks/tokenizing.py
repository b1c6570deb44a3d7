"""Tokenizing a corpus to shards, compared with the bare tokenizers library on the same text.

    python benchmarks/tokenizing.py --tokenizer tokenizer.json --text books/*.txt --write

Both encode the same documents on the same cores, alternately, each time in a new process (a second run in the same
process is slower), and the median counts. The bare library gets all documents at once, already in memory, and its ids
are discarded; gecko reads the files, encodes, and writes token shards with checksums. Processor time is that of all
threads: other load on the machine changes it less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tokenizers
from measuring import machine, parser_of, publish

from gecko.data import load_tokenizer
from gecko.data.tokenize import TokenizingPlan, run_here

FAST = "tokenizers, encode_batch_fast"


@dataclass(frozen=True)
class Taken:
    seconds: float
    processor: float
    """Processor seconds of all threads together."""


class Clock:
    """Measures the time of a block."""

    taken: Taken

    def __enter__(self) -> Clock:
        self._begin = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        seconds, processor = self._begin
        self.taken = Taken(time.perf_counter() - seconds, time.process_time() - processor)


def main() -> None:
    arguments = _arguments()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.cores)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    ways: dict[str, Callable[[], Taken]] = {
        "tokenizers, encode_batch": lambda: alone(bare, arguments, "encode_batch"),
        FAST: lambda: alone(bare, arguments, "encode_batch_fast"),
        "gecko tokenize": lambda: alone(shards, arguments),
    }
    taken: dict[str, list[Taken]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, measure in ways.items():
            taken[name].append(measure())
    publish("tokenizing.md", report(arguments, taken), arguments.write)


def alone(measure: Callable[..., Taken], *given: object) -> Taken:
    """Return ``measure(*given)``, run in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *given).result()


def bare(arguments: argparse.Namespace, method: str) -> Taken:
    """Measure the library on all documents."""
    texts = [Path(path).read_text(encoding="utf-8") for path in arguments.text]
    library = tokenizers.Tokenizer.from_file(arguments.tokenizer)
    library.encode_special_tokens = True
    with Clock() as clock:
        encodings = getattr(library, method)(texts, add_special_tokens=False)
    assert len(encodings) == len(texts)
    return clock.taken


def shards(arguments: argparse.Namespace) -> Taken:
    """Measure from finding the files to the manifest; the tokenizer is loaded before, as for the bare library."""
    folder = Path(tempfile.mkdtemp()) / "shards"
    tokenizer = load_tokenizer(arguments.tokenizer)
    try:
        with Clock() as clock:
            plan = TokenizingPlan.make(arguments.text, tokenizer, folder)
            plan.start()
            for _ in run_here(plan, tokenizer, arguments.cores):
                pass
            plan.finish()
        return clock.taken
    finally:
        shutil.rmtree(folder.parent)


def report(arguments: argparse.Namespace, taken: dict[str, list[Taken]]) -> list[str]:
    size = sum(Path(path).stat().st_size for path in arguments.text)
    seconds = {name: statistics.median(one.seconds for one in times) for name, times in taken.items()}
    processor = {name: statistics.median(one.processor for one in times) for name, times in taken.items()}
    names = sorted(Path(path).name for path in arguments.text)
    command = f"python benchmarks/tokenizing.py --tokenizer {Path(arguments.tokenizer).name} --cores {arguments.cores}"
    lines = [
        "# Tokenizing",
        "",
        f"{date.today()}, {machine()}; tokenizers {tokenizers.__version__}. {len(names)} files, {size:,} bytes "
        f"({names[0]} … {names[-1]}), {Path(arguments.tokenizer).name}, {arguments.cores} cores, medians of "
        f"{arguments.rounds} rounds in turns, load average {os.getloadavg()[1]:.1f}. Command: `{command} "
        f"--rounds {arguments.rounds} --text {shlex.quote('*.txt')}`.",
        "",
        "| | seconds | fastest | slowest | MB/s | speed, of the fast one's | processor time, s | of the fast one's |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in taken:
        times = [one.seconds for one in taken[name]]
        median, speed = seconds[name], size / seconds[name] / 1e6
        lines.append(
            f"| {name} | {median:.2f} | {min(times):.2f} | {max(times):.2f} | {speed:.2f} | "
            f"{seconds[FAST] / median:.1%} | {processor[name]:.2f} | {processor[name] / processor[FAST]:.1%} |"
        )
    lines += [
        "",
        "The bare library encodes documents that are in memory, and no id leaves it; gecko reads files and writes "
        "checked shards.",
    ]
    return lines


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--text", nargs="+", required=True, help="text files, a document each")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
