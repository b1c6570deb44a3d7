"""The loss by position in a text, and whether it rises where a chunk of attention begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gecko.eval.intervals import Values, student
from gecko.eval.perplexity import segment_losses
from gecko.eval.results import Report, Results, Score, quiet
from gecko.eval.scored_model import ScoredModel
from gecko.eval.texts import Cursor, Text
from gecko.extras import require


@dataclass(frozen=True)
class Grid:
    """How positions are put together.

    Position p is that of the p-th token after the document start, counted from 0, which the model's query at p
    predicts: chunks of attention begin at multiples of ``chunk``, and the token there is the first that a new chunk
    predicts.

    Raises:
        ValueError: fewer than two chunks, or bins that would hold a border.
    """

    length: int
    """Tokens of a segment."""
    chunk: int
    bin: int
    """Positions whose losses are averaged."""
    first: int
    """How many tokens after a border are held against the rest of their chunk."""

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
    def of(cls, length: int, chunk: int) -> Grid:
        """Bins of a quarter chunk, and the first sixteenth of a chunk against the rest."""
        return cls(length, chunk, chunk // 4 if chunk % 4 == 0 else 1, max(1, chunk // 16))


class Moments:
    """Mean and spread of vectors that come one by one, in constant memory."""

    def __init__(self, width: int) -> None:
        self.n = 0
        self.mean, self._squares = np.zeros(width), np.zeros(width)

    def add(self, x: Values) -> None:
        self.n += 1
        step = x - self.mean
        self.mean += step / self.n
        self._squares += step * (x - self.mean)

    def errors(self) -> Values | None:
        """Standard errors of the means; None for fewer than two."""
        return None if self.n < 2 else np.sqrt(self._squares / (self.n - 1) / self.n)


def positions(
    model: ScoredModel[Any], texts: Sequence[Text], grid: Grid, *, segments: int | None = None, report: Report = quiet
) -> Results:
    """Loss by position in segments of ``grid.length`` tokens, each read from a fresh state, and the borders' test.

    The test pairs, in every chunk but a segment's first, the mean loss of the first tokens after the border with that
    of the chunk's other tokens: what text stands there does not depend on the grid, so without an effect of borders
    the difference is zero on average. Reported are its mean, and Student's t over chunks, which takes chunks for
    independent. Memory does not grow with the number of segments.

    Args:
        segments: at most so many; None: all that the texts hold.

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
            _add_segment(Cursor(segment_losses(model, cursor, grid.length)), grid, by_position, in_chunk, border)
    if not by_position.n:
        raise ValueError(
            f"a text must be at least as long as a segment, {grid.length:,} tokens; none of {len(texts)} is. "
            "Ask for a shorter --length."
        )
    if by_position.n == 1:
        notes.append("one segment: positions have no standard error")
    details = {"by_position": _curve(by_position, grid.bin), "in_chunk": _curve(in_chunk, grid.bin)}
    settings = vars(grid) | {"segments": by_position.n, "texts": [text.name for text in texts]}
    return Results("positions", _scores(border, grid), settings, 0, notes, details)


def _add_segment(losses: Cursor, grid: Grid, by_position: Moments, in_chunk: Moments, border: Moments) -> None:
    means = []
    for number in range(grid.length // grid.chunk):
        chunk = torch.cat(list(losses.take(grid.chunk))).double().numpy()
        bins = chunk.reshape(-1, grid.bin).mean(1)
        means.append(bins)
        if number:
            after, rest = chunk[: grid.first].mean(), chunk[grid.first :].mean()
            in_chunk.add(bins)
            border.add(np.array([after, rest, after - rest]))
    by_position.add(np.concatenate(means))


def _curve(samples: Moments, width: int) -> list[dict[str, float | int | None]]:
    errors = samples.errors()
    return [
        {"position": place * width, "mean": float(mean), "n": samples.n,
         "standard_error": None if errors is None else float(errors[place])}
        for place, mean in enumerate(samples.mean)
    ]  # fmt: skip


def _scores(border: Moments, grid: Grid) -> list[Score]:
    where, errors = {"chunk": grid.chunk, "first": grid.first}, border.errors()
    names = ("nats after a border", "nats in the rest", "border minus rest")
    scores = [
        Score(name, float(mean), border.n, "chunks", student(mean, error, border.n, "chunks"), where)
        for name, mean, error in zip(names, border.mean, [None] * 3 if errors is None else errors, strict=True)
    ]
    if errors is None or not errors[2] > 0:  # one chunk, or all alike: nothing to test
        return scores
    t = float(border.mean[2] / errors[2])
    p = 2 * float(require("scipy.stats", "eval").t.sf(abs(t), border.n - 1))
    return [*scores, *(Score(name, x, border.n, "chunks", None, where) for name, x in (("t", t), ("p, two-sided", p)))]
