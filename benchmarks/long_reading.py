"""One text of millions of tokens read as one document: memory, speed, and loss by position.

    python benchmarks/long_reading.py books/*.txt --write     # 4,000,000 bytes of them, as gecko read reads

Without files the text is the source of Python's standard library. The loss varies with the content of the text.
Therefore a second pass reads the same text with a new state at the start of every bin: the difference between the
passes is the effect of the long context. Errors are standard errors over pieces of the text.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from measuring import DEMO, START, byte_tokens, describe, find_model, parser_of, peak, publish, resident, text_files
from torch import Tensor

import gecko
from gecko.inference import piece_length, score
from gecko.runtime.process import keep_freed_memory

EARLY = 10_000
WARM_UP_PIECES = 100
"""Pieces read before the measurement: the C library's heap grows a little within some hundred thousand tokens."""


@dataclass
class Prefill:
    losses: Tensor
    """Loss of every byte in nats."""
    seconds: float = 0.0
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By position: bytes in use, and the largest number of bytes so far."""


@dataclass(frozen=True)
class Bin:
    begin: int
    loss: float
    error: float
    change: float
    """Loss minus that of the same bytes read from a new state at the start of the bin."""
    change_error: float


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    folder, files = find_model(arguments.model), text_files(arguments.texts)
    model = gecko.load(folder)
    cold = warm_up(model)
    width = _bin_width(arguments.length, arguments.bins, piece_length(model.config))
    long = read_once(model, files, arguments.length)
    fresh = read_afresh(model, files, arguments.length, width)
    bins = compare(long.losses, fresh, width, piece_length(model.config))
    slope, slope_error = trend(long.losses - fresh, piece_length(model.config))
    files_given = " ".join(path.name for path in files) if arguments.texts else ""
    command = f"python benchmarks/long_reading.py {files_given} --length {arguments.length}".replace("  ", " ")
    heading = describe(model, folder, files, f"{command} --threads {arguments.threads}")
    publish("long_reading.md", _page(heading, cold, long, bins, (slope, slope_error)), arguments.write)


def warm_up(model: gecko.Gecko) -> int:
    """Read another text first; return the largest memory of the process after the first ``EARLY`` tokens."""
    piece, cold = piece_length(model.config), 0
    text = torch.randint(0, 256, (WARM_UP_PIECES, piece))
    for done, _ in enumerate(score(model, text.unbind()), start=1):
        if done * piece >= EARLY and not cold:
            cold = peak()
    return cold


def read_once(model: gecko.Gecko, files: Sequence[Path], length: int) -> Prefill:
    """Read the whole text with one state."""
    # Written before the measurement, so that its memory is the same at every position.
    reading = Prefill(torch.full((length,), torch.nan))
    marks = iter([EARLY, *(length * part // 4 for part in (1, 2, 3, 4))])
    mark, done, begin = next(marks), 0, time.perf_counter()
    for losses, _ in score(model, chain([START], byte_tokens(files, length))):
        reading.losses[done : done + len(losses)] = losses
        done += len(losses)
        while mark is not None and done >= mark:
            reading.memory[mark] = (resident(), peak())
            mark = next(marks, None)
    reading.seconds = time.perf_counter() - begin
    return reading


def read_afresh(model: gecko.Gecko, files: Sequence[Path], length: int, width: int) -> Tensor:
    """Return the loss of every byte, with a new state at the start of its bin."""
    tokens = torch.cat(list(byte_tokens(files, length)))
    return torch.cat([
        losses
        for part in tokens.split(width)
        for losses, _ in score(model, [START, part])
    ])  # fmt: skip


def compare(long: Tensor, fresh: Tensor, width: int, piece: int) -> list[Bin]:
    bins = []
    for place, (ours, theirs) in enumerate(zip(long.split(width), fresh.split(width), strict=True)):
        (loss, error), (change, change_error) = _mean(ours, piece), _mean(ours - theirs, piece)
        bins.append(Bin(place * width, loss, error, change, change_error))
    return bins


def trend(change: Tensor, piece: int) -> tuple[float, float]:
    """Return the slope of a line fitted to the pieces, in nats per byte per million positions, and its error."""
    y = _piece_means(change, piece)
    x = (torch.arange(len(y), dtype=torch.float64) + 0.5) * piece / 1e6
    x = x - x.mean()
    slope = (x * y).sum() / x.square().sum()
    rest = y - y.mean() - slope * x
    return float(slope), float((rest.square().sum() / max(1, len(y) - 2) / x.square().sum()).sqrt())


def _mean(losses: Tensor, piece: int) -> tuple[float, float]:
    """Return mean and standard error. Neighbouring bytes are correlated, so pieces count as independent, not bytes."""
    means = _piece_means(losses, piece)
    return float(losses.double().mean()), float(means.std() / len(means) ** 0.5) if len(means) > 1 else float("nan")


def _piece_means(losses: Tensor, piece: int) -> Tensor:
    whole = losses[: len(losses) // piece * piece] if len(losses) >= piece else losses
    return whole.double().view(-1, min(piece, len(whole))).mean(dim=1)


def _bin_width(length: int, bins: int, piece: int) -> int:
    return max(1, round(length / bins / piece)) * piece


def _page(heading: str, cold: int, reading: Prefill, bins: list[Bin], trend: tuple[float, float]) -> list[str]:
    length = len(reading.losses)
    (early, early_peak), (late, late_peak) = reading.memory[EARLY], reading.memory[length]
    third = max(1, len(bins) // 3)
    return [
        f"# {length:,} positions of one document", "", heading, "",
        f"Read in {reading.seconds:.1f} s, {length / reading.seconds:,.0f} tokens a second, loss included.", "",
        "## Memory", "",
        "| position | memory in use, MB | highest so far, MB |", "|---:|---:|---:|",
        *(f"| {at:,} | {now / 1e6:.1f} | {most / 1e6:.1f} |" for at, (now, most) in reading.memory.items()), "",
        f"From position {EARLY:,} to {length:,}: in use × {late / early:.4f}, highest × {late_peak / early_peak:.4f}. "
        f"Another text of {WARM_UP_PIECES} pieces was read before, in which the C library's heap found its size; "
        f"the highest after the first {EARLY:,} tokens of the process was {cold / 1e6:.1f} MB.", "",
        "## Loss by position", "",
        f"Mean over the first third {_mean_of(bins[:third]):.4f}, over the last third {_mean_of(bins[-third:]):.4f} "
        f"nats a byte. Against the same bytes read afresh from each bin's start: "
        f"{sum(b.change for b in bins[:third]) / third:+.4f} and {sum(b.change for b in bins[-third:]) / third:+.4f}; "
        f"trend {trend[0]:+.5f} ± {trend[1]:.5f} nats a byte per million positions.", "",
        "| from position | loss, nats a byte | ± | against reading afresh | ± |", "|---:|---:|---:|---:|---:|",
        *(f"| {b.begin:,} | {b.loss:.4f} | {b.error:.4f} | {b.change:+.4f} | {b.change_error:.4f} |" for b in bins),
    ]  # fmt: skip


def _mean_of(bins: list[Bin]) -> float:
    return sum(b.loss for b in bins) / len(bins)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("texts", nargs="*", help="files to read as bytes, over and over if they are short")
    parser.add_argument("--model", default=DEMO, help="a model's folder, or a run's")
    parser.add_argument("--length", type=int, default=4_000_000, help="bytes to read")
    parser.add_argument("--bins", type=int, default=40, help="bins of the loss by position")
    return parser.parse_args()


if __name__ == "__main__":
    main()
