"""Time to answer a second question about a book: from a snapshot of the state, and by reading the book again.

    python benchmarks/snapshot.py book.txt --write

Time to first token is from the arrival of the question, with the model loaded. With a snapshot it includes loading the
state's file, verifying its checksum, and reading the question; otherwise, reading the book and the question.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from measuring import DEMO, START, byte_tokens, describe, find_model, parser_of, publish, text_files
from torch import Tensor

import gecko
from gecko.inference import Sampling, TokenStream, read
from gecko.runtime.process import keep_freed_memory

QUESTION = "In short, what was it that "


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    folder, files = find_model(arguments.model), text_files(arguments.texts)
    model = gecko.load(folder)
    question = torch.frombuffer(bytearray(QUESTION.encode()), dtype=torch.uint8).long()
    read(model, chain([START], byte_tokens(files, 100_000)))  # the first calls of a process are slower
    with tempfile.TemporaryDirectory() as scratch:
        snapshots = {kind: Path(scratch) / kind for kind in ("float32", "compact")}
        state = read(model, chain([START], byte_tokens(files, arguments.length))).state
        for kind, path in snapshots.items():
            state.save(path, compact=kind == "compact")
        again = _again(model, chain([START], byte_tokens(files, arguments.length)), question)
        rows = []
        for kind, path in snapshots.items():
            times = [_from_snapshot(model, path, question) for _ in range(arguments.repeats)]
            rows.append((kind, path.stat().st_size, statistics.median(times), max(times)))
    command = f"python benchmarks/snapshot.py --length {arguments.length} --threads {arguments.threads}"
    heading = describe(model, folder, files, command)
    publish("snapshot.md", _page(heading, arguments.length, again, rows), arguments.write)


def _again(model: gecko.Gecko, book: Iterable[Tensor], question: Tensor) -> float:
    begin = time.perf_counter()
    _first_token(model, chain(book, [question]), None)
    return time.perf_counter() - begin


def _from_snapshot(model: gecko.Gecko, path: Path, question: Tensor) -> float:
    begin = time.perf_counter()
    _first_token(model, [question], gecko.GeckoState.load(path))
    return time.perf_counter() - begin


def _first_token(model: gecko.Gecko, tokens: Iterable[Tensor], state: gecko.GeckoState | None) -> int:
    reading = read(model, tokens, state)
    return next(iter(TokenStream(model, [reading], seeds=[0], sampling=Sampling(0.8), max_new_tokens=1))).token


def _page(heading: str, length: int, again: float, rows: list[tuple[str, int, float, float]]) -> list[str]:
    return [
        "# A second question about a book", "", heading, "",
        f"The book: {length:,} bytes. The question: {len(QUESTION)} bytes. Seconds to the first token.", "",
        "| | file, bytes | median, s | slowest, s | times shorter |", "|---|---:|---:|---:|---:|",
        f"| reading the book again | | {again:.2f} | | 1 |",
        *(f"| snapshot, {kind} | {size:,} | {median:.4f} | {slowest:.4f} | {again / median:,.0f} |"
          for kind, size, median, slowest in rows),
    ]  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("texts", nargs="*", help="files that make up the book, over and over if they are short")
    parser.add_argument("--model", default=DEMO, help="a model's folder, or a run's")
    parser.add_argument("--length", type=int, default=1_000_000, help="bytes of the book")
    parser.add_argument("--repeats", type=int, default=20, help="questions from each snapshot")
    return parser.parse_args()


if __name__ == "__main__":
    main()
