"""Effect of the working memory's reach on the loss: one long text, with the memory emptied at regular intervals.

    python benchmarks/memory_reach.py runs/main/compare_gecko/seed-0 books/gibbon/*.txt --write

The text is read once by several rows that differ only in how often their memory is emptied. The rest of the state
(norms, CEMA, keys and values of the window) is kept in all of them. Differences are to the row with the longest reach,
over the same bytes; intervals are bootstrapped over blocks of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from measuring import START, byte_tokens, describe, find_model, parser_of, publish
from torch import Tensor

import gecko
from gecko.eval.results import Interval, Values, bootstrap_mean
from gecko.inference.prefill import inference
from gecko.runtime.process import keep_freed_memory
from gecko.state import GeckoState

PIECE, BLOCK = 2048, 1024
REACHES = (2, 4, 16, 64, 256, 1024, 4096)
"""Reaches in units of 1,024 bytes."""
SEED = 0


@dataclass(frozen=True)
class Row:
    reach: int
    """Number of bytes after which the memory is emptied."""
    loss: float
    """Nats per byte."""
    change: Interval | None
    difference: float
    """Loss minus that of the longest reach."""


def block_losses(model: gecko.Gecko, text: Tensor, reaches: Sequence[int]) -> Values:
    """Return losses in nats per byte (rows, blocks), one row per reach."""
    rows, state, found = len(reaches), None, []
    with inference(model):
        for begin, tokens, targets in _pieces(text):
            if state is not None:
                state = with_empty_memory(model, state, torch.tensor([begin % reach == 0 for reach in reaches]))
            losses, state = model.token_losses(tokens.expand(rows, -1), targets.expand(rows, -1), state=state)
            found.append(losses.double().unflatten(1, (-1, BLOCK)).mean(-1))
            if begin % 2**18 == 0:
                print(f"{begin:,} of {len(text):,} bytes", flush=True)
    return torch.cat(found, dim=1).numpy()


def _pieces(text: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    inputs = torch.cat([START, text[:-1]])
    for begin in range(0, len(text), PIECE):
        yield begin, inputs[begin : begin + PIECE], text[begin : begin + PIECE]


def with_empty_memory(model: gecko.Gecko, state: GeckoState, rows: Tensor) -> GeckoState:
    """Return the state with empty memory in the given ``rows`` (B,) bool."""
    fresh = model.empty_state(state.batch_size)
    mixers = []
    for mixer, empty in zip(state.mixers, fresh.mixers, strict=True):
        if mixer.memory is None or empty.memory is None:
            raise ValueError("the model must have a working memory; this one has none. Try a Gecko.")
        mixers.append(replace(mixer, memory=empty.memory.where(rows, mixer.memory)))
    return replace(state, mixers=tuple(mixers))


def compare(losses: Values, reaches: Sequence[int]) -> list[Row]:
    changes = losses - losses[-1]
    intervals = [bootstrap_mean(change, "blocks", SEED) if np.any(change) else None for change in changes]
    return [
        Row(reach, float(row.mean()), interval, float(change.mean()))
        for reach, row, change, interval in zip(reaches, losses, changes, intervals, strict=True)
    ]


def page(heading: str, rows: Sequence[Row], length: int) -> list[str]:
    return [
        "# How far the working memory should reach", "", heading, "",
        f"{length:,} bytes read as one document by rows whose memory is emptied every so many bytes; the rest of the "
        f"state goes on. Differences to the last row, with 95 % bootstrap intervals over {length // BLOCK:,} blocks "
        f"of {BLOCK:,} bytes.", "",
        "| memory emptied every | nats a byte | difference | interval |", "|---:|---:|---:|---:|",
        *(f"| {row.reach:,} bytes | {row.loss:.5f} | {row.difference:+.5f} | {_shown(row.change)} |" for row in rows),
    ]  # fmt: skip


def _shown(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:+.5f} .. {interval.high:+.5f}"


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("model", help="a model's folder, or a run's")
    parser.add_argument("texts", nargs="+", type=Path, help="files to read as bytes, as one text")
    parser.add_argument("--length", type=int, default=4096 * 1024, help="bytes to read")
    arguments = parser.parse_args()
    if arguments.length < PIECE or arguments.length % PIECE:
        parser.error(f"--length must be a multiple of {PIECE:,} bytes; got {arguments.length:,}")
    held = sum(path.stat().st_size for path in arguments.texts)
    if held < arguments.length:
        parser.error(f"the texts must hold the {arguments.length:,} bytes of --length; they hold {held:,}")
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    reaches = [1024 * reach for reach in REACHES if 1024 * reach <= arguments.length]
    text = torch.cat(list(byte_tokens(arguments.texts, arguments.length)))
    folder = find_model(arguments.model)
    model = gecko.load(folder)
    rows = compare(block_losses(model, text, reaches), reaches)
    command = (
        f"python benchmarks/memory_reach.py {arguments.model} {' '.join(path.name for path in arguments.texts)} "
        f"--length {arguments.length} --threads {arguments.threads}"
    )
    heading = describe(model, folder, arguments.texts, command)
    publish("evidence/memory_reach.md", page(heading, rows, arguments.length), arguments.write)


if __name__ == "__main__":
    main()
