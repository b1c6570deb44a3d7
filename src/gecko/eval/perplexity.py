"""Perplexity by context length, and loss by position with a test for higher loss after chunk borders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gecko.data.text_stream import check_loss
from gecko.eval.results import Report, Results, Score, Values, bootstrap_mean, quiet, student
from gecko.eval.scored_model import Cursor, ScoredModel, Text, TextSize, measure
from gecko.runtime.process import require

LENGTHS = tuple(1024 * 4**power for power in range(7))
"""1 K to 4 M."""
MOST_BLOCKS, LEAST_BLOCK = 4096, 1024
_LARGEST_EXPONENT = 500
"""Largest logarithm of a perplexity that is reported; texts of very long words exceed it per word."""


def perplexity(
    model: ScoredModel[Any], texts: Sequence[Text], lengths: Sequence[int] | None = None, *, seed: int = 0,
    report: Report = quiet,
) -> Results:  # fmt: skip
    """Measure perplexity for every context length, on the same tokens.

    For each length a text is cut into disjoint segments of that length. Each segment is read from an empty state after
    a document-start token, and all its tokens are scored. Memory does not grow with length.

    Args:
        lengths: context lengths in tokens, each a divisor of the next; None for those of ``LENGTHS`` that fit into
            every text. With given lengths, texts shorter than the largest are skipped and noted.
        seed: seed of the bootstrap.

    Raises:
        ValueError: a length does not divide the next one, or all texts are too short.
    """
    counts, notes = [sum(map(len, text.tokens(model.tokenizer))) for text in texts], list[str]()
    if lengths is None:
        chosen = [length for length in LENGTHS if length <= min(counts)]
        if not chosen:
            raise ValueError(f"texts must have at least {LENGTHS[0]:,} tokens; the shortest has {min(counts):,}.")
        for length in LENGTHS[len(chosen) :]:
            notes.append(f"context {length:,} skipped: the shortest text has {min(counts):,} tokens")
    else:
        chosen = sorted(set(lengths))
        if not chosen or chosen[0] < 1 or any(b % a for a, b in pairwise(chosen)):
            raise ValueError(
                f"context lengths must be at least 1 and each a divisor of the next, so that segments of all hold the "
                f"same tokens; got {list(lengths)}. Try powers of two."
            )
    kept = _scored_parts(model, texts, counts, chosen[-1], notes)
    total = TextSize(*map(sum, zip(*(size for _, size in kept), strict=True)))
    block, scores, blocks = _block(chosen, total.tokens), list[Score](), list[Values]()
    for number, length in enumerate(chosen):
        sums, place = np.zeros(total.tokens // block), 0
        for text, size in kept:
            cursor = Cursor(text.tokens(model.tokenizer))
            for _ in range(size.tokens // length):
                report(f"context {length:,}: {place:,} of {total.tokens:,} tokens")
                for losses in segment_losses(model, cursor, length):
                    np.add.at(sums, (place + np.arange(len(losses))) // block, losses.double().numpy())
                    place += len(losses)
        blocks.append(sums)
        scores += _scores(length, sums, total, seed)
        if number:  # paired by block; a negative change is better
            change, name = blocks[-1] - blocks[-2], f"change from {chosen[number - 1]:,}, nats"
            spread = bootstrap_mean(change / block, f"blocks of {block:,} tokens", seed)
            mean, where = float(change.sum()) / total.tokens, {"context": length}
            scores.append(Score(name, mean, total.tokens, "tokens", spread, where))
    settings = {"lengths": chosen, "texts": [text.name for text, _ in kept], "block": block}
    return Results("perplexity", scores, settings, seed, notes, {"bytes": total.bytes, "words": total.words})


def _scored_parts(
    model: ScoredModel[Any], texts: Sequence[Text], counts: Sequence[int], largest: int, notes: list[str]
) -> list[tuple[Text, TextSize]]:
    """Return texts with the sizes of what is scored: the first tokens, a multiple of the largest length."""
    kept = []
    for text, count in zip(texts, counts, strict=True):
        scored = count // largest * largest
        if not scored:
            notes.append(f"skipped {text.name}: its {count:,} tokens are fewer than the context of {largest:,}")
            continue
        if scored < count:
            notes.append(f"{text.name}: the first {scored:,} of {count:,} tokens are scored, whole segments")
        if lost := check_loss(model.tokenizer, text.start(), allowed=True):
            notes.append(f"{text.name}: {lost}")
        kept.append((text, measure(model.tokenizer, Cursor(text.tokens(model.tokenizer)).take(scored))))
    if not kept:
        raise ValueError(
            f"a text must be at least as long as the largest context, {largest:,} tokens; the longest has "
            f"{max(counts):,}. Ask for shorter contexts (--lengths), or join the files to one text (--joined)."
        )
    return kept


def _block(lengths: Sequence[int], total: int) -> int:
    """Return the tokens per block, a divisor of every segment. Blocks are large, so that they are nearly independent
    and at most ``MOST_BLOCKS``, but small enough that there are many."""
    block = lengths[0]
    while block % 2 == 0 and block > LEAST_BLOCK:
        block //= 2
    while total // block > MOST_BLOCKS and lengths[-1] % (2 * block) == 0:
        block *= 2
    return block


def segment_losses(model: ScoredModel[Any], cursor: Cursor, length: int) -> Iterator[Tensor]:
    """Yield the losses of the next ``length`` tokens, read after a document-start token, in pieces."""
    start = torch.tensor([model.tokenizer.document_start], device="cpu")
    return model.losses(chain([start], cursor.take(length)))


def _scores(length: int, blocks: Values, size: TextSize, seed: int) -> list[Score]:
    """Return the loss per token, word and byte; texts without words have no score per word."""
    mean, per_block = float(blocks.mean()), len(blocks)
    spread = bootstrap_mean(blocks, f"blocks of {size.tokens // per_block:,} tokens", seed)
    measures: dict[str, Callable[[float], float]] = {
        "nats a token": lambda x: x * per_block / size.tokens,
        "perplexity, token": lambda x: math.exp(x * per_block / size.tokens),
        "perplexity, word": lambda x: math.exp(x * per_block / size.words),
        "bits a byte": lambda x: x * per_block / size.bytes / math.log(2),
    }
    if not size.words or mean * per_block / size.words > _LARGEST_EXPONENT:
        del measures["perplexity, word"]
    return [
        Score(name, of_block(mean), size.tokens, "tokens", spread and spread.map(of_block), {"context": length})
        for name, of_block in measures.items()
    ]


@dataclass(frozen=True)
class PositionGrid:
    """Segments, chunks and bins of positions.

    Position p is that of the p-th token after the document start, counted from 0, which the query at p predicts.
    Attention chunks start at multiples of ``chunk``; the token there is the first that the new chunk predicts.

    Raises:
        ValueError: a segment has fewer than two chunks, or a bin contains a chunk border.
    """

    length: int
    """Tokens per segment."""
    chunk: int
    bin: int
    """Positions per bin, whose losses are averaged."""
    first: int
    """Number of tokens after a border that are compared with the rest of their chunk."""

    def __post_init__(self) -> None:
        if self.chunk < 2 or self.length < 2 * self.chunk or self.length % self.chunk:
            raise ValueError(
                f"a segment must hold two whole chunks of at least 2 tokens or more, to see a border; got length "
                f"{self.length:,} and chunk {self.chunk:,}. Try a length of {8 * max(2, self.chunk):,}."
            )
        if self.bin < 1 or self.chunk % self.bin:
            raise ValueError(f"a bin must divide a chunk, so that none holds a border; got {self.bin}, {self.chunk}.")
        if not 1 <= self.first < self.chunk:
            raise ValueError(f"the first tokens of a chunk must be 1 to {self.chunk - 1}; got {self.first}.")

    @classmethod
    def of(cls, length: int, chunk: int) -> PositionGrid:
        """Return a grid with bins of a quarter chunk, which compares the first sixteenth of a chunk with the rest."""
        return cls(length, chunk, chunk // 4 if chunk % 4 == 0 else 1, max(1, chunk // 16))


class Moments:
    """Running mean and variance of vectors, in constant memory."""

    def __init__(self, width: int) -> None:
        self.n = 0
        self.mean, self._squares = np.zeros(width), np.zeros(width)

    def add(self, x: Values) -> None:
        self.n += 1
        step = x - self.mean
        self.mean += step / self.n
        self._squares += step * (x - self.mean)

    def errors(self) -> list[float] | list[None]:
        """Return the standard errors of the means; None for fewer than two vectors."""
        return [None] * len(self.mean) if self.n < 2 else np.sqrt(self._squares / (self.n - 1) / self.n).tolist()


def positions(
    model: ScoredModel[Any], texts: Sequence[Text], grid: PositionGrid, *, segments: int | None = None,
    report: Report = quiet,
) -> Results:  # fmt: skip
    """Measure the loss by position in segments of ``grid.length`` tokens, and test for higher loss after borders.

    Each segment is read from an empty state. In every chunk except a segment's first, the test pairs the mean loss of
    the first tokens after the border with that of the chunk's other tokens. The text does not depend on the grid, so
    without an effect of borders the expected difference is zero. The scores are its mean and Student's t over chunks,
    which assumes that chunks are independent. Memory does not grow with the number of segments.

    Args:
        segments: largest number of segments; None for all.

    Raises:
        ValueError: no text is as long as a segment.
    """
    by_position, in_chunk = Moments(grid.length // grid.bin), Moments(grid.chunk // grid.bin)
    border, notes = Moments(3), []
    for text in texts:
        held = sum(map(len, text.tokens(model.tokenizer))) // grid.length
        if not held:
            notes.append(f"skipped {text.name}: it is shorter than a segment of {grid.length:,} tokens")
        cursor = Cursor(text.tokens(model.tokenizer))
        for number in range(held if segments is None else min(held, segments - by_position.n)):
            report(f"{text.name}, segment {number + 1} of {held}")
            losses, means = Cursor(segment_losses(model, cursor, grid.length)), []
            for place in range(grid.length // grid.chunk):
                chunk = torch.cat(list(losses.take(grid.chunk))).double().numpy()
                means.append(chunk.reshape(-1, grid.bin).mean(1))
                if place:
                    after, rest = chunk[: grid.first].mean(), chunk[grid.first :].mean()
                    in_chunk.add(means[-1])
                    border.add(np.array([after, rest, after - rest]))
            by_position.add(np.concatenate(means))
    if not by_position.n:
        raise ValueError(
            f"a text must be at least as long as a segment, {grid.length:,} tokens; none of {len(texts)} is. "
            "Ask for a shorter --length."
        )
    if by_position.n == 1:
        notes.append("one segment: positions have no standard error")
    details = {"by_position": _curve(by_position, grid.bin), "in_chunk": _curve(in_chunk, grid.bin)}
    settings = vars(grid) | {"segments": by_position.n, "texts": [text.name for text in texts]}
    return Results("positions", _position_scores(border, grid), settings, 0, notes, details)


def _curve(samples: Moments, width: int) -> list[dict[str, float | int | None]]:
    return [
        {"position": place * width, "mean": mean, "n": samples.n, "standard_error": error}
        for place, (mean, error) in enumerate(zip(samples.mean.tolist(), samples.errors(), strict=True))
    ]


def _position_scores(border: Moments, grid: PositionGrid) -> list[Score]:
    where, errors = {"chunk": grid.chunk, "first": grid.first}, border.errors()
    names = ("nats after a border", "nats in the rest", "border minus rest")
    scores = [
        Score(name, float(mean), border.n, "chunks", student(mean, error, border.n, "chunks"), where)
        for name, mean, error in zip(names, border.mean, errors, strict=True)
    ]
    if not errors[2]:  # one chunk, or equal chunks: no test
        return scores
    t = float(border.mean[2] / errors[2])
    p = 2 * float(require("scipy.stats", "eval").t.sf(abs(t), border.n - 1))
    return [*scores, *(Score(name, x, border.n, "chunks", None, where) for name, x in (("t", t), ("p, two-sided", p)))]
