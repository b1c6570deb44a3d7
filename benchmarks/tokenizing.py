"""Tokenizing a corpus to shards, against the bare tokenizers library on the same text.

    python benchmarks/tokenizing.py --tokenizer tokenizer.json --text books/*.txt --write

Both encode the same documents on the same cores, in turns, and the median counts. The bare library is given all
documents at once, already in memory, and its ids are thrown away; gecko reads the files, encodes, and writes token
shards with checksums.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import tokenizers
import torch

from gecko.data import load_tokenizer
from gecko.data.executors import run_here
from gecko.data.tokenizing import TokenizingPlan
from gecko.train.hardware import describe_hardware

RESULTS = Path(__file__).parent / "results" / "tokenizing.md"


def main() -> None:
    arguments = _arguments()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.cores)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    ways: dict[str, Callable[[], float]] = {
        "tokenizers, encode_batch": lambda: bare(arguments, "encode_batch"),
        "tokenizers, encode_batch_fast": lambda: bare(arguments, "encode_batch_fast"),
        "gecko tokenize": lambda: shards(arguments),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, measure in ways.items():
            seconds[name].append(measure())
    page = report(arguments, seconds)
    print(page)
    if arguments.write:
        RESULTS.write_text(page, encoding="utf-8")


def bare(arguments: argparse.Namespace, method: str) -> float:
    """Seconds that the library takes for all documents."""
    texts = [Path(path).read_text(encoding="utf-8") for path in arguments.text]
    library = tokenizers.Tokenizer.from_file(arguments.tokenizer)
    library.encode_special_tokens = True
    begin = time.perf_counter()
    encodings = getattr(library, method)(texts, add_special_tokens=False)
    taken = time.perf_counter() - begin
    assert len(encodings) == len(texts)
    return taken


def shards(arguments: argparse.Namespace) -> float:
    """Seconds from finding the files to the manifest; the tokenizer is loaded before, as for the bare library."""
    folder = Path(tempfile.mkdtemp()) / "shards"
    tokenizer = load_tokenizer(arguments.tokenizer)
    try:
        begin = time.perf_counter()
        plan = TokenizingPlan.make(arguments.text, tokenizer, folder)
        plan.start()
        for _ in run_here(plan, arguments.cores):
            pass
        plan.finish()
        return time.perf_counter() - begin
    finally:
        shutil.rmtree(folder.parent)


def report(arguments: argparse.Namespace, seconds: dict[str, list[float]]) -> str:
    size = sum(Path(path).stat().st_size for path in arguments.text)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min(taken for name, taken in median.items() if name != "gecko tokenize")
    names = sorted(Path(path).name for path in arguments.text)
    hardware = "; ".join(describe_hardware(torch.device("cpu")).values())
    command = f"python benchmarks/tokenizing.py --tokenizer {Path(arguments.tokenizer).name} --cores {arguments.cores}"
    lines = [
        "# Tokenizing",
        "",
        f"{date.today()}, {hardware}; tokenizers {tokenizers.__version__}. {len(names)} files, {size:,} bytes "
        f"({names[0]} … {names[-1]}), {Path(arguments.tokenizer).name}, {arguments.cores} cores, medians of "
        f"{arguments.rounds} rounds in turns. Command: `{command} --rounds {arguments.rounds} --text "
        f"{shlex.quote('*.txt')}`.",
        "",
        "| | seconds | slowest | MB/s | of the faster bare one |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, taken in median.items():
        lines.append(
            f"| {name} | {taken:.2f} | {max(seconds[name]):.2f} | {size / taken / 1e6:.2f} | {best / taken:.1%} |"
        )
    lines += [
        "",
        "The bare library encodes documents that are in memory, and no id leaves it; gecko reads files and writes "
        "checked shards.",
        "",
    ]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, help="text files, a document each")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} into benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
