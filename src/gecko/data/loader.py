"""Rows of packed documents: row i is a function of the seed and i, so any step can be resumed exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gecko.data.packing import SPLIT_STREAM, TokenizedCorpus, permutation
from gecko.data.shuffle import Shuffle

IGNORED = -100
"""The target that the loss leaves out."""


@dataclass(frozen=True)
class Batch:
    """Packed rows, (batch, length) int64 on the CPU each."""

    tokens: Tensor
    targets: Tensor
    """The next token; ``IGNORED`` where that is of another document."""
    segment_ids: Tensor
    """Which document of its row a token is of, from 0."""

    @property
    def scored_tokens(self) -> int:
        """Targets that are not ignored."""
        return int((self.targets != IGNORED).sum())


Row = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Tokens, targets and segment ids, (length,) each."""


class Rows(Protocol):
    """Training rows without end, each a function of its index alone."""

    rows_per_epoch: int
    """Rows until the first document comes again."""

    def row(self, index: int) -> Row:
        """Any row, in any order, from any thread."""


class Loader:
    """Rows as batches. Nothing is remembered between calls, so they may come in any order and from any thread.

    Raises:
        ValueError: the batch size is out of range.
    """

    def __init__(self, rows: Rows, batch_size: int) -> None:
        check_sizes(batch_size=batch_size)
        self.rows = rows
        self.batch_size = batch_size

    @property
    def rows_per_epoch(self) -> int:
        return self.rows.rows_per_epoch

    def batch(self, step: int) -> Batch:
        """Rows ``step * batch_size`` and following.

        Raises:
            ValueError: ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0; got {step}.")
        first = step * self.batch_size
        return _stack([self.rows.row(index) for index in range(first, first + self.batch_size)])


class PackedRows:
    """Rows of a corpus in memory.

    Every epoch lays all documents end to end in a random order of its own, cuts them into rows of
    ``sequence_length + 1`` tokens, the last of which is the first of the next row, and takes the rows in a random
    order: else a batch would be of one book. What does not fill a row at the end of an epoch is left out. The orders
    of the last two epochs used are kept.

    Raises:
        ValueError: the corpus is shorter than a row, or the length or the seed is out of range.
    """

    def __init__(self, corpus: TokenizedCorpus, sequence_length: int, seed: int) -> None:
        self.sequence_length = sequence_length
        self.rows_per_epoch = rows_in(corpus.num_tokens, sequence_length)
        permutation(1, seed, SPLIT_STREAM)  # refuses a negative seed now, not at the first batch
        self._corpus, self._seed = corpus, seed
        # Two epochs, because the rows of one batch may lie in two.
        self._epoch = lru_cache(maxsize=2)(self._laid_out)

    def row(self, index: int) -> Row:
        epoch, row = divmod(index, self.rows_per_epoch)
        layout, order = self._epoch(epoch)
        return layout.row(order[row] * self.sequence_length, self.sequence_length)

    def _laid_out(self, epoch: int) -> tuple[_Layout, Shuffle]:
        documents, rows = SPLIT_STREAM + 1 + 2 * epoch, SPLIT_STREAM + 2 + 2 * epoch
        layout = _Layout.of(self._corpus, permutation(len(self._corpus), self._seed, documents))
        return layout, Shuffle.of(self.rows_per_epoch, self._seed, rows)


class PackedLoader(Loader):
    """Batches of ``PackedRows``; arguments and errors as there and in ``Loader``."""

    def __init__(self, corpus: TokenizedCorpus, batch_size: int, sequence_length: int, seed: int) -> None:
        super().__init__(PackedRows(corpus, sequence_length, seed), batch_size)


def rows_in(tokens: int, sequence_length: int) -> int:
    """Rows that so many tokens end to end are cut into; ValueError where there is none."""
    check_sizes(sequence_length=sequence_length)
    if tokens <= sequence_length:
        raise ValueError(
            f"a row takes sequence_length + 1 = {sequence_length + 1} tokens, so the corpus must hold as many; "
            f"got {tokens}. Give more text, or set sequence_length={tokens - 1}."
        )
    return (tokens - 1) // sequence_length


def validation_batches(corpus: TokenizedCorpus, batch_size: int, sequence_length: int) -> Iterator[Batch]:
    """The whole corpus once, documents packed in their order; the last batch may have fewer rows.

    Every token but the first of each document is a target exactly once, so the targets of all
    batches that are not ignored are ``corpus.num_tokens - len(corpus)``, and ``corpus.num_bytes``
    is what they amount to in bytes of text. The last row is filled up with a document of its own
    that has no targets.

    Raises:
        ValueError: a size is out of range.
    """
    check_sizes(batch_size=batch_size, sequence_length=sequence_length)
    layout = _Layout.of(corpus, np.arange(len(corpus)))
    begins = range(0, layout.num_tokens - 1, sequence_length)
    for first in range(0, len(begins), batch_size):
        yield _stack([layout.row(begin, sequence_length) for begin in begins[first : first + batch_size]])


@dataclass(frozen=True)
class _Layout:
    """Documents laid end to end in one order."""

    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    """Where in ``tokens`` each document begins, in the layout's order."""
    borders: NDArray[np.int64]
    """(documents + 1,) where in the layout each document begins, and the layout ends."""

    @classmethod
    def of(cls, corpus: TokenizedCorpus, order: NDArray[np.int64]) -> _Layout:
        borders = np.concatenate([[0], np.cumsum(corpus.lengths[order])])
        return cls(corpus.tokens, corpus.offsets[order], borders)

    @property
    def num_tokens(self) -> int:
        return int(self.borders[-1])

    def row(self, begin: int, length: int) -> Row:
        """The row that starts at ``begin``; beyond the layout's end, zeros without targets."""
        end = min(begin + length + 1, self.num_tokens)
        first = int(np.searchsorted(self.borders, begin, side="right")) - 1
        last = int(np.searchsorted(self.borders, end, side="left"))
        borders = np.clip(self.borders[first : last + 1], begin, end)
        counts = np.diff(borders)
        shift = np.repeat(self.offsets[first:last] - self.borders[first:last], counts)
        tokens = self.tokens[np.arange(begin, end) + shift].astype(np.int64)
        segments = np.repeat(np.arange(last - first), counts)
        return make_row(tokens, segments, length)


def make_row(tokens: NDArray[np.int64], segments: NDArray[np.int64], length: int) -> Row:
    """A row of up to ``length + 1`` tokens that lie end to end and the numbers of their documents, from 0.

    Where there are fewer, zeros follow, as a document of their own without targets.
    """
    filled = len(tokens)
    missing = length + 1 - filled
    tokens = np.pad(tokens, (0, missing))
    segments = np.pad(segments, (0, missing), constant_values=segments[-1] + 1)
    targets = np.where(segments[1:] == segments[:-1], tokens[1:], IGNORED)
    targets[filled - 1 :] = IGNORED
    return tokens[:-1], targets, segments[:-1]


def _stack(rows: list[Row]) -> Batch:
    tokens, targets, segment_ids = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    return Batch(tokens, targets, segment_ids)


def check_sizes(**sizes: int) -> None:
    """ValueError where one is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value}.")
