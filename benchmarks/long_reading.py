"""One text of millions of tokens read as one document: memory, speed, and loss by position.

    python benchmarks/long_reading.py books/*.txt --write     # 4,000,000 bytes of them, as gecko read reads

Without files the text is the source of Python's standard library. The loss varies with the content of the text.
Therefore a second pass reads the same text with a new state at the start of every bin: the difference between the
passes is the effect of the long context. Errors are standard errors over pieces of the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
from measuring import START, byte_tokens, model_and_texts, parsed, peak, publish, reading_parser, resident, table
from scipy import stats
from torch import Tensor

import gecko
from gecko.inference import piece_length, score
from gecko.runtime.process import keep_freed_memory

EARLY = 10_000
WARM_UP_PIECES = 100
"""Pieces read before the measurement: the C library's heap grows a little within some hundred thousand tokens."""


def warm_up(model: gecko.Gecko) -> int:
    """Read another text first; return the largest memory of the process after the first ``EARLY`` tokens."""
    piece, cold = piece_length(model.config), 0
    text = torch.randint(0, 256, (WARM_UP_PIECES, piece))
    for done, _ in enumerate(score(model, text.unbind()), start=1):
        if done * piece >= EARLY and not cold:
            cold = peak()
    return cold


def read_once(model: gecko.Gecko, files: Sequence[Path], length: int) -> tuple[Tensor, dict[int, tuple[int, int]]]:
    """Read the whole text with one state; return the loss of every byte, and memory and highest memory by position."""
    # Written before the measurement, so that its memory is the same at every position.
    losses, memory, done = torch.full((length,), torch.nan), dict[int, tuple[int, int]](), 0
    marks = [EARLY, *(length * part // 4 for part in (1, 2, 3, 4))]
    for part, _ in score(model, chain([START], byte_tokens(files, length))):
        losses[done : done + len(part)] = part
        done += len(part)
        while marks and done >= marks[0]:
            memory[marks.pop(0)] = resident(), peak()
    return losses, memory


def read_afresh(model: gecko.Gecko, files: Sequence[Path], length: int, width: int) -> Tensor:
    """Return the loss of every byte, with a new state at the start of its bin."""
    tokens = torch.cat(list(byte_tokens(files, length)))
    return torch.cat([losses for part in tokens.split(width) for losses, _ in score(model, [START, part])])


def piece_means(losses: Tensor, piece: int) -> Tensor:
    whole = losses[: len(losses) // piece * piece] if len(losses) >= piece else losses
    return whole.double().view(-1, min(piece, len(whole))).mean(dim=1)


def mean_and_error(losses: Tensor, piece: int) -> tuple[float, float]:
    """Return mean and standard error. Neighbouring bytes are correlated, so pieces count as independent, not bytes."""
    means = piece_means(losses, piece)
    return float(losses.double().mean()), float(means.std() / len(means) ** 0.5) if len(means) > 1 else float("nan")


def main() -> None:
    options = {"length": (4_000_000, "bytes to read"), "bins": (40, "bins of the loss by position")}
    given = parsed(reading_parser(__doc__, **options))
    keep_freed_memory()
    model, files, about = model_and_texts(given)
    length = given.length
    cold, piece = warm_up(model), piece_length(model.config)
    width = max(1, round(length / given.bins / piece)) * piece
    begin = time.perf_counter()
    losses, memory = read_once(model, files, length)
    seconds = time.perf_counter() - begin
    change = losses - read_afresh(model, files, length, width)
    bins = [
        (place * width, *mean_and_error(losses_, piece), *mean_and_error(change_, piece))
        for place, (losses_, change_) in enumerate(zip(losses.split(width), change.split(width), strict=True))
    ]
    # A line fitted to the pieces, in nats per byte per million positions.
    means = piece_means(change, piece)
    trend = stats.linregress((torch.arange(len(means)) + 0.5) * piece / 1e6, means) if len(means) > 2 else None
    slope = "not known" if trend is None else f"{trend.slope:+.5f} ± {trend.stderr:.5f}"
    (early, early_peak), (late, late_peak) = memory[EARLY], memory[length]
    third = max(1, len(bins) // 3)
    (first, gain), (last, last_gain) = (
        [fmean(one[column] for one in part) for column in (1, 3)] for part in (bins[:third], bins[-third:])
    )
    publish(
        "long_reading.md", given, f"{length:,} positions of one document", about,
        f"Read in {seconds:.1f} s, {length / seconds:,.0f} tokens a second, loss included.",
        "## Memory",
        table(
            ["position|,", "memory in use, MB|.1f", "highest so far, MB|.1f"],
            ((at, now / 1e6, most / 1e6) for at, (now, most) in memory.items()),
        ),
        f"From position {EARLY:,} to {length:,}: in use × {late / early:.4f}, highest × {late_peak / early_peak:.4f}. "
        f"Another text of {WARM_UP_PIECES} pieces was read before, in which the C library's heap found its size; "
        f"the highest after the first {EARLY:,} tokens of the process was {cold / 1e6:.1f} MB.",
        "## Loss by position",
        f"Mean over the first third {first:.4f}, over the last third {last:.4f} nats a byte. Against the same bytes "
        f"read afresh from each bin's start: {gain:+.4f} and {last_gain:+.4f}; trend {slope} nats a byte per million "
        "positions.",
        table(["from position|,", "loss, nats a byte|.4f", "±|.4f", "against reading afresh|+.4f", "±|.4f"], bins),
    )  # fmt: skip


if __name__ == "__main__":
    main()
