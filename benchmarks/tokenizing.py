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
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import tokenizers
from measuring import in_turns, parsed, parser_of, publish, table

from gecko.data import load_tokenizer
from gecko.data.tokenize import TokenizingPlan, run_here

FAST = "tokenizers, encode_batch_fast"


def alone(given: argparse.Namespace, method: str) -> tuple[float, float]:
    """Return the seconds, and the processor seconds of all threads together, of one way in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(shards if method == "gecko" else bare, given, method).result()


def bare(given: argparse.Namespace, method: str) -> tuple[float, float]:
    """Measure the library on all documents."""
    texts = [Path(path).read_text(encoding="utf-8") for path in given.text]
    library = tokenizers.Tokenizer.from_file(given.tokenizer)
    library.encode_special_tokens = True
    begin = time.perf_counter(), time.process_time()
    encodings = getattr(library, method)(texts, add_special_tokens=False)
    end = time.perf_counter(), time.process_time()
    assert len(encodings) == len(texts)
    return end[0] - begin[0], end[1] - begin[1]


def shards(given: argparse.Namespace, _: str) -> tuple[float, float]:
    """Measure from finding the files to the manifest; the tokenizer is loaded before, as for the bare library."""
    tokenizer = load_tokenizer(given.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter(), time.process_time()
        plan = TokenizingPlan.make(given.text, tokenizer, Path(folder) / "shards")
        plan.start()
        for _ in run_here(plan, tokenizer, given.cores):
            pass
        plan.finish()
        return time.perf_counter() - begin[0], time.process_time() - begin[1]


def main() -> None:
    parser = parser_of(__doc__, cores=(2, "of both"), rounds=(3, "in turns"))
    parser.add_argument("--text", nargs="+", required=True, help="text files, a document each")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    given = parsed(parser)
    os.environ["RAYON_NUM_THREADS"] = str(given.cores)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    methods = {"tokenizers, encode_batch": "encode_batch", FAST: "encode_batch_fast", "gecko tokenize": "gecko"}
    found = in_turns({name: partial(alone, given, method) for name, method in methods.items()}, given.rounds)
    size = sum(Path(path).stat().st_size for path in given.text)
    medians = {name: [statistics.median(column) for column in zip(*found[name], strict=True)] for name in found}
    rows = []
    for name, (median, processor) in medians.items():
        seconds = [one for one, _ in found[name]]
        speeds = size / median / 1e6, medians[FAST][0] / median
        rows.append((name, median, min(seconds), max(seconds), *speeds, processor, processor / medians[FAST][1]))
    count = len(given.text)
    given.text = ["*.txt"]
    publish(
        "tokenizing.md", given, "Tokenizing",
        f"tokenizers {tokenizers.__version__}. {count} files, {size:,} bytes, {Path(given.tokenizer).name}, "
        f"{given.cores} cores, medians of {given.rounds} rounds in turns.",
        table(["", "seconds|.2f", "fastest|.2f", "slowest|.2f", "MB/s|.2f", "speed, of the fast one's|.1%",
               "processor time, s|.2f", "of the fast one's|.1%"], rows),
        "The bare library encodes documents that are in memory, and no id leaves it; gecko reads files and writes "
        "checked shards.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
