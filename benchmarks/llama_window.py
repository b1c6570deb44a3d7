"""Measure what a converted Llama loses beyond its window, and how it reads a million tokens.

The loss by position is measured with a window of two chunks, with and without sinks, and with full attention. Decoding
is timed before and after the million tokens.

    python benchmarks/llama_window.py models/smollm2 --novels books/*.txt --chats qmsum_val.jsonl --write
    python benchmarks/llama_window.py models/smollm2 --novels books/*.txt --million 1000000 --write

A document is a novel, files of Python's standard library one after another, or meetings of a file of QMSum one after
another. The same weights read each document with several windows; full attention is a window that holds the whole text.
Keys and values are in float32. Every measurement is written at once to results/llama_window.jsonl, and none is made
again; ``--write`` moves them to llama_window.jsonl.xz, of each document and window the longest. The tables have 95 %
intervals over documents, by Student's t.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import RESULTS, described, find_model, parsed, parser_of, peak, publish, resident, table
from torch import Tensor

import gecko
from gecko.data import Tokenizer
from gecko.data.sources import stdlib_files
from gecko.data.tokenizers import load_tokenizer
from gecko.eval.results import standard_error, student
from gecko.inference import Sampling, TokenStream, read, score
from gecko.io.files import mend_lines, read_lines
from gecko.io.fingerprints import fingerprint
from gecko.models.gecko import sharing_parameters

BLOCK, MARKS = 512, 20
"""Tokens whose mean loss is kept, and measurements along the million tokens."""
CELL = ("model", "kind", "document", "skip", "chunk", "sinks")
"""Fields that name a measurement; "model" is a name with a hash of the weights. Full attention has chunk 0."""
MARK = ("model", "phase", "position")

Row = dict[str, Any]


def documents(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and text of the documents; one of each kind before the next of a kind."""
    size = 8 * arguments.tokens
    novels = ((path.name, path.read_text(encoding="utf-8")[arguments.skip :][:size]) for path in arguments.novels)
    source = joined(((path.stem, path.read_text(encoding="utf-8", errors="replace")) for path in stdlib_files()), size)
    chats = joined(meetings(arguments.chats) if arguments.chats else (), size)
    kinds = {"novel": novels, "source": source, "chat": chats}
    for places in itertools.islice(itertools.zip_longest(*kinds.values()), arguments.documents):
        yield from ((kind, *found) for kind, found in zip(kinds, places, strict=True) if found is not None)


def joined(parts: Iterator[tuple[str, str]] | Sequence[tuple[str, str]], size: int) -> Iterator[tuple[str, str]]:
    """Yield texts of at least ``size`` characters, each under the name of its first part."""
    name, text = "", ""
    for part, content in parts:
        name, text = name or part, text + content + "\n"
        if len(text) >= size:
            yield name, text
            name, text = "", ""


def meetings(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path)):
        turns = (f"{turn['speaker']}: {turn['content']}" for turn in line["meeting_transcripts"])
        yield f"meeting {number}", "\n".join(turns)


def measure(model: gecko.Gecko, tokens: Tensor, chunk: int, sinks: int) -> list[float]:
    """Return the mean losses of the blocks in nats. The token at position 0 of a document has none, and counts as 0."""
    window = chunk or -(-len(tokens) // 2)
    reader = sharing_parameters(model, chunk_size=window, sinks=sinks, bfloat16_window=False)
    losses = torch.cat([torch.zeros(1), *(scored.losses for scored in score(reader, [tokens], piece=1024))])
    return [round(float(mean), 3) for mean in losses.double().view(-1, BLOCK).mean(1)]


def windows(arguments: argparse.Namespace, path: Path, name: str, model: gecko.Gecko, tokenizer: Tokenizer) -> None:
    """Make the measurements that are not in the file yet."""
    done = {tuple(row[key] for key in CELL): len(row["losses"]) * BLOCK for row in measured(path) if "losses" in row}
    cells = [(chunk, sinks) for chunk in arguments.chunks for sinks in arguments.sinks]
    for kind, document, text in documents(arguments):
        tokens = torch.tensor(tokenizer.encode(text)[: arguments.tokens])
        if len(tokens) < arguments.tokens:
            raise SystemExit(f"{document} must hold --tokens {arguments.tokens}; it holds {len(tokens)} after --skip")
        for chunk, sinks in [(0, 0), *cells]:
            length = min(arguments.full, arguments.tokens) if chunk == 0 else arguments.tokens
            cell = (name, kind, document, arguments.skip, chunk, sinks)
            if done.get(cell, 0) < length:
                losses = measure(model, tokens[:length], chunk, sinks)
                append(path, {**dict(zip(CELL, cell, strict=True)), "losses": losses})


def measured(path: Path) -> list[Row]:
    """Return the measurements of earlier pages, and those that were made since: of each document and window the
    longest, of each part of the million tokens the last."""
    packed = path.with_name(f"{path.name}.xz")
    with lzma.open(packed, "rt", encoding="utf-8") if packed.exists() else nullcontext([]) as lines:
        rows = [*map(json.loads, lines), *(read_lines(path) if path.exists() else [])]
    rows.sort(key=lambda row: len(row.get("losses", ())))
    return list({tuple(row[key] for key in (CELL if "losses" in row else MARK)): row for row in rows}.values())


def append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print({key: value for key, value in row.items() if key != "losses"}, flush=True)


def million(path: Path, name: str, model: gecko.Gecko, tokens: Tensor, length: int, count: int) -> None:
    """Decode ``count`` tokens, read ``length`` tokens, and decode again; write time and memory along the way."""

    def mark(phase: str, position: int, tokens: int, seconds: float) -> None:
        row = {"model": name, "phase": phase, "position": position, "ms_per_token": round(1e3 * seconds / tokens, 3)}
        append(path, {**row, "resident": resident(), "peak": peak()})

    def decode(phase: str) -> None:
        stream = TokenStream(model, [reading], seeds=[0], sampling=Sampling(1.0), max_new_tokens=count)
        part = count // MARKS
        for number in range(MARKS):
            begin = time.perf_counter()
            for _ in itertools.islice(stream, part):
                pass
            mark(phase, reading.state.position[0] + (number + 1) * part, part, time.perf_counter() - begin)

    reading = read(model, [tokens[:1]])
    decode("decode at 0")
    part, endless = length // MARKS, itertools.cycle(tokens.split(1024))
    for number in range(MARKS):
        begin, held = time.perf_counter(), 0
        batch: list[Tensor] = []
        while held < part:
            batch.append(next(endless)[: part - held])
            held += len(batch[-1])
        reading = read(model, batch, reading.state)
        mark("read", (number + 1) * part, part, time.perf_counter() - begin)
    decode(f"decode at {length:,}")


def shown(values: Sequence[float], sign: str = "") -> str:
    """Return the mean over documents with its interval."""
    mean = float(np.mean(values))
    interval = student(mean, standard_error(values), len(values), "documents")
    between = "" if interval is None else f" ({interval.low:{sign}.3f} .. {interval.high:{sign}.3f})"
    return f"{mean:{sign}.3f}{between}"


def window_rows(found: Sequence[Row]) -> Iterator[tuple[object, ...]]:
    """Yield a row for every kind, window and range of positions, from the end of the window on."""
    cells = {(row["kind"], row["document"], row["chunk"], row["sinks"]): row["losses"] for row in found}
    for kind, chunk, sinks in sorted({(kind, chunk, sinks) for kind, _, chunk, sinks in cells if chunk}):
        mine = {name: losses for (k, name, c, s), losses in cells.items() if (k, c, s) == (kind, chunk, sinks)}
        full, other = ({n: cells.get((kind, n, *cell), []) for n in mine} for cell in ((0, 0), (chunk, 0)))
        longest = max(map(len, mine.values()))
        edges = [2 * chunk * 2**i // BLOCK for i in range(20) if 2 * chunk * 2**i // BLOCK < longest]
        for low, high in itertools.pairwise([*edges, longest]):
            here = [n for n, losses in mine.items() if len(losses) >= high]
            within = {n: float(np.mean(mine[n][low:high])) for n in here}
            over, gained = (
                [value - float(np.mean(than[n][low:high])) for n, value in within.items() if len(than[n]) >= high]
                for than in (full, other if sinks else {n: [] for n in mine})
            )
            yield (
                kind, chunk, sinks, f"{low * BLOCK:,} .. {high * BLOCK - 1:,}", len(here),
                shown(list(within.values())), shown(over, "+") if over else "", shown(gained, "+") if gained else "",
            )  # fmt: skip


def million_rows(found: Sequence[Row]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each phase of the million tokens, from its parts."""
    for phase in dict.fromkeys(row["phase"] for row in found):
        parts = sorted((row for row in found if row["phase"] == phase), key=lambda row: row["position"])
        times, memory = ([row[key] for row in parts] for key in ("ms_per_token", "resident"))
        halves = np.median(times[: len(times) // 2]), np.median(times[len(times) // 2 :])
        yield phase, parts[-1]["position"], *halves, *(memory[i] / 1e6 for i in (0, (len(memory) - 1) // 2, -1))


def page(found: Sequence[Row]) -> list[str]:
    marks = [row for row in found if "phase" in row]
    parts = [
        "Nats per token, means over documents with 95 % intervals over them. Up to the window all are equal.",
        table(
            ["text", "chunk|,", "sinks|d", "positions|>", "documents|d", "loss|>", "above full attention|>",
             "above no sinks|>"],
            window_rows([row for row in found if "losses" in row]),
        ),
    ]  # fmt: skip
    if marks:
        columns = ["", "up to|,", "ms a token, median of the first half|.2f", "of the second half|.2f",
                   "MB in use after the first part|,.0f", "the first half|,.0f", "all|,.0f"]  # fmt: skip
        about = f"Measured in {MARKS} parts of equal length."
        parts += ["## Reading and decoding far into a text", about, table(columns, million_rows(marks))]
    return parts


def main() -> None:
    parser = parser_of(
        __doc__, threads=True, documents=(4, "documents of each kind"),
        skip=(20_000, "characters at the start of each novel to leave out"),
        tokens=(65_536, f"tokens to read of each, a multiple of {BLOCK}"),
        full=(8192, "tokens to read with full attention"), chunks=([1024, 512, 256], "chunks of the windows"),
        sinks=([1, 0], "numbers of sinks"), decode=(20_000, "tokens to decode before and after --million"),
        rows=(RESULTS / "llama_window.jsonl", "file of the measurements"),
    )  # fmt: skip
    parser.add_argument("model", help="a folder of gecko convert")
    parser.add_argument("--novels", nargs="*", type=Path, default=[], help="files, one document each")
    parser.add_argument("--chats", type=Path, help="a file of QMSum, in JSON Lines")
    parser.add_argument("--million", type=int, metavar="N", help="read N tokens instead, and decode before and after")
    given = parsed(parser)
    if given.tokens % BLOCK or given.full % BLOCK or any(2 * chunk % BLOCK for chunk in given.chunks):
        parser.error(f"--tokens, --full and two of --chunks must be multiples of {BLOCK}")
    if given.rows.exists():
        mend_lines(given.rows)
    folder = find_model(given.model)
    model, tokenizer = gecko.load(folder), load_tokenizer(folder)
    name = f"{folder.name} {fingerprint(model)}"
    if given.million:
        text = "".join(path.read_text(encoding="utf-8") for path in given.novels[:4])
        tokens = torch.tensor(tokenizer.encode(text))
        million(given.rows, name, model, tokens, given.million, given.decode)
    else:
        windows(given, given.rows, name, model, tokenizer)
    found = measured(given.rows)
    if given.write:
        lines = "".join(json.dumps(row) + "\n" for row in found).encode()
        given.rows.with_name(f"{given.rows.name}.xz").write_bytes(lzma.compress(lines, preset=9 | lzma.PRESET_EXTREME))
        given.rows.unlink(missing_ok=True)
    publish(
        "llama_window.md", given, "What a converted Llama loses beyond its window",
        described(model, folder, given.novels), *page([row for row in found if row["model"] == name]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
