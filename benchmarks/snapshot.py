"""Time to answer a second question about a book: from a snapshot of the state, and by reading the book again.

    python benchmarks/snapshot.py book.txt --write

Time to first token is from the arrival of the question, with the model loaded. With a snapshot it includes loading the
state's file, verifying its checksum, and reading the question; otherwise, reading the book and the question.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from measuring import START, byte_tokens, model_and_texts, parsed, publish, reading_parser, seconds_of, table
from torch import Tensor

import gecko
from gecko.inference import Sampling, TokenStream, read
from gecko.runtime.process import keep_freed_memory

QUESTION = "In short, what was it that "


def first_token(model: gecko.Gecko, tokens: Iterable[Tensor], snapshot: Path | None = None) -> None:
    reading = read(model, tokens, snapshot and gecko.GeckoState.load(snapshot))
    next(iter(TokenStream(model, [reading], seeds=[0], sampling=Sampling(0.8), max_new_tokens=1)))


def main() -> None:
    options = {"length": (1_000_000, "bytes of the book"), "repeats": (20, "questions from each snapshot")}
    given = parsed(reading_parser(__doc__, **options))
    keep_freed_memory()
    model, files, about = model_and_texts(given)
    question = torch.frombuffer(bytearray(QUESTION.encode()), dtype=torch.uint8).long()
    read(model, chain([START], byte_tokens(files, 100_000)))  # the first calls of a process are slower
    book = partial(byte_tokens, files, given.length)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        state = read(model, chain([START], book())).state
        again = seconds_of(lambda: first_token(model, chain([START], book(), [question])))
        for kind in ("float32", "compact"):
            path = Path(scratch) / kind
            state.save(path, compact=kind == "compact")
            asked = partial(first_token, model, [question], path)
            times = [seconds_of(asked) for _ in range(given.repeats)]
            size, median = path.stat().st_size, statistics.median(times)
            rows.append((f"snapshot, {kind}", size, f"{median:.4f}", f"{max(times):.4f}", again / median))
    publish(
        "snapshot.md", given, "A second question about a book", about,
        f"The book: {given.length:,} bytes. The question: {len(QUESTION)} bytes. Seconds to the first token.",
        table(
            ["", "file, bytes|,", "median, s|.2f", "slowest, s|.2f", "times shorter|,.0f"],
            [("reading the book again", None, again, None, 1), *rows],
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
