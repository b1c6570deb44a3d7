"""Rows and batches of packed documents. Row i is a function of the seed and i, so any step can be resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gecko.data.packing import SPLIT_STREAM, Shuffle, TokenizedCorpus, permutation

IGNORED = -100
"""Target that the loss ignores."""
LANE_STREAM = 1 << 33  # first random stream of the epochs' first rows of lanes, beyond the streams of mixtures


@dataclass(frozen=True)
class Batch:
    """Packed rows, (batch, length) int64 on the CPU each."""

    tokens: Tensor
    targets: Tensor
    """Next tokens; ``IGNORED`` if the next token belongs to another document."""
    segment_ids: Tensor
    """Index in its row, from 0, of the document of each token."""

    @property
    def scored_tokens(self) -> int:
        """Number of targets that are not ignored."""
        return int((self.targets != IGNORED).sum())


Row = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Tokens, targets and segment ids, (length,) each."""


class Rows(Protocol):
    """Endless sequence of training rows, each a function of its index alone."""

    rows_per_epoch: int
    """Number of rows before a document repeats."""

    def row(self, index: int) -> Row:
        """Return a row; calls may have any order and come from any thread."""


class Loader:
    """Groups rows into batches. It has no state, so calls may have any order and come from any thread. Raise ValueError
    if the batch size is below 1."""

    def __init__(self, rows: Rows, batch_size: int) -> None:
        check_sizes(batch_size=batch_size)
        self.rows, self.batch_size, self.rows_per_epoch = rows, batch_size, rows.rows_per_epoch

    def batch(self, step: int) -> Batch:
        """Return the rows from ``step * batch_size`` on. Raise ValueError if ``step`` is negative."""
        if step < 0:
            raise ValueError(f"step must be at least 0; got {step}.")
        return batch_of(self.rows, range(step * self.batch_size, (step + 1) * self.batch_size))


def batch_of(rows: Rows, indices: range) -> Batch:
    """Return the rows of the given indices as a batch."""
    return _stack(map(rows.row, indices))


def _stack(rows: Iterable[Row]) -> Batch:
    return Batch(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))


class OrderedRows:
    """Rows cut one after the other out of all documents in one order per epoch. ``row`` reads each epoch's shuffled, so
    that a batch is not from one book."""

    rows_per_epoch: int
    documents: int  # number of documents of an epoch
    seed: int
    streams: tuple[int, int]  # random stream of the first epoch's order of rows, and the step to the next one's

    def ordered_row(self, epoch: int, place: int) -> Row:
        """Return the row at ``place`` of the epoch, before rows are shuffled; it goes on where the row before it ends.
        Segment ids are the places of the documents in the epoch's order."""
        raise NotImplementedError

    def row(self, index: int) -> Row:
        epoch, row = divmod(index, self.rows_per_epoch)
        first, step = self.streams
        place = Shuffle(self.rows_per_epoch, self.seed, first + step * epoch)[row]
        return _numbered_from_zero(self.ordered_row(epoch, place))


class PackedRows(OrderedRows):
    """Rows of a corpus in memory.

    Every epoch concatenates all documents in a new random order and cuts them into rows of ``sequence_length + 1``
    tokens. The last token of a row is the first of the next. Tokens at the end of an epoch that do not fill a row are
    left out of that epoch. Raise ValueError if the corpus is shorter than a row, or the length or the seed is out of
    range.
    """

    streams = (SPLIT_STREAM + 2, 2)

    def __init__(self, corpus: TokenizedCorpus, sequence_length: int, seed: int) -> None:
        self.rows_per_epoch = rows_in(corpus.num_tokens, sequence_length)
        permutation(1, seed, SPLIT_STREAM)  # raises for a negative seed now, not at the first batch
        self.sequence_length, self.seed, self.documents = sequence_length, seed, len(corpus)

        @lru_cache(maxsize=2)  # one batch may have rows of two epochs
        def laid_out(epoch: int) -> Callable[[int, int], Row]:
            return _laid_out(corpus, permutation(len(corpus), seed, SPLIT_STREAM + 1 + 2 * epoch))

        self._laid_out = laid_out

    def ordered_row(self, epoch: int, place: int) -> Row:
        return self._laid_out(epoch)(place * self.sequence_length, self.sequence_length)


class PackedLoader(Loader):
    """Batches of ``PackedRows``; arguments and errors as there and in ``Loader``."""

    def __init__(self, corpus: TokenizedCorpus, batch_size: int, sequence_length: int, seed: int) -> None:
        super().__init__(PackedRows(corpus, sequence_length, seed), batch_size)


def rows_in(tokens: int, sequence_length: int) -> int:
    """Return the number of full rows in ``tokens`` concatenated tokens; raise ValueError if there is none."""
    check_sizes(sequence_length=sequence_length)
    if tokens <= sequence_length:
        raise ValueError(
            f"a row takes sequence_length + 1 = {sequence_length + 1} tokens, so the corpus must hold as many; "
            f"got {tokens}. Give more text, or set sequence_length={tokens - 1}."
        )
    return (tokens - 1) // sequence_length


def validation_batches(corpus: TokenizedCorpus, batch_size: int, sequence_length: int) -> Iterator[Batch]:
    """Yield the whole corpus once, documents packed in their order; the last batch may have fewer rows.

    Every token except the first of each document is a target exactly once. So all batches together have
    ``corpus.num_tokens - len(corpus)`` targets that are not ignored; ``TokenBytes.of_targets`` counts their bytes.
    The last row is padded with a separate document that has no targets. Raise ValueError if a size is below 1.
    """
    check_sizes(batch_size=batch_size, sequence_length=sequence_length)
    row_at = _laid_out(corpus, np.arange(len(corpus)))
    begins = range(0, corpus.num_tokens - 1, sequence_length)
    for first in range(0, len(begins), batch_size):
        rows = (row_at(begin, sequence_length) for begin in begins[first : first + batch_size])
        yield _stack(map(_numbered_from_zero, rows))


def _laid_out(corpus: TokenizedCorpus, order: NDArray[np.int64]) -> Callable[[int, int], Row]:
    """Concatenate the documents in ``order``. Return a function of begin and length that returns the row there; past
    the end it has zeros without targets."""
    offsets, borders = corpus.offsets[order], np.cumsum(np.append(0, corpus.lengths[order]))

    def row(begin: int, length: int) -> Row:
        end = min(begin + length + 1, corpus.num_tokens)
        first = int(np.searchsorted(borders, begin, side="right")) - 1
        last = int(np.searchsorted(borders, end, side="left"))
        counts = np.diff(np.clip(borders[first : last + 1], begin, end))
        shift = np.repeat(offsets[first:last] - borders[first:last], counts)
        tokens = corpus.tokens[np.arange(begin, end) + shift].astype(np.int64)
        return make_row(tokens, np.repeat(np.arange(first, last), counts), length)

    return row


def make_row(tokens: NDArray[np.int64], segments: NDArray[np.int64], length: int) -> Row:
    """Make a row of up to ``length + 1`` consecutive tokens and the indices of their documents.

    Fewer tokens are padded with zeros, as a separate document without targets.
    """
    filled = len(tokens)
    missing = length + 1 - filled
    tokens = np.pad(tokens, (0, missing))
    segments = np.pad(segments, (0, missing), constant_values=segments[-1] + 1)
    targets = np.where(segments[1:] == segments[:-1], tokens[1:], IGNORED)
    targets[filled - 1 :] = IGNORED
    return tokens[:-1], targets, segments[:-1]


def _numbered_from_zero(row: Row) -> Row:
    tokens, targets, segments = row
    return tokens, targets, segments - segments[0]


def check_sizes(**sizes: int) -> None:
    """Raise ValueError if a size is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value}.")


class LaneRows:
    """Rows of ``lanes`` lanes, for a state that is carried from one step to the next.

    A batch has one row of every lane: row i is that of lane i mod ``lanes`` in step i div ``lanes``. It goes on where
    the lane's row of the step before ended, so a document that is longer than a row is read from its start to its end.

    In each epoch, a lane reads one of ``lanes`` equal parts of consecutive rows, in the epoch's order of documents.
    Rows that are left over, fewer than the lanes, are before the first part and after the last; their division is
    random in each epoch. Segment ids differ for all documents of all epochs, so a state continues in its document only.
    """

    def __init__(self, rows: OrderedRows, lanes: int, seed: int) -> None:
        self.lanes = lanes
        self.rows_per_lane, self._spare = divmod(rows.rows_per_epoch, lanes)
        self.rows_per_epoch = self.rows_per_lane * lanes
        self._rows, self._seed = rows, seed

    def row(self, index: int) -> Row:
        step, lane = divmod(index, self.lanes)
        epoch, row = divmod(step, self.rows_per_lane)
        first = int(np.random.PCG64((self._seed, LANE_STREAM + epoch)).random_raw()) % (self._spare + 1)
        tokens, targets, segments = self._rows.ordered_row(epoch, first + lane * self.rows_per_lane + row)
        # One more than the documents, because padding is a document too.
        return tokens, targets, segments + epoch * (self._rows.documents + 1)


class MixedLanes:
    """Lanes of several sources: the first lanes are of the first source. Each source keeps its lanes."""

    def __init__(self, sources: Sequence[LaneRows]) -> None:
        self._sources, self._borders = list(sources), np.cumsum([0, *(rows.lanes for rows in sources)])
        # Until the first lane starts again, a batch has one row of every lane.
        self.rows_per_epoch = min(rows.rows_per_lane for rows in sources) * int(self._borders[-1])

    def row(self, index: int) -> Row:
        step, lane = divmod(index, int(self._borders[-1]))
        source = int(np.searchsorted(self._borders, lane, side="right")) - 1
        rows = self._sources[source]
        return rows.row(step * rows.lanes + lane - int(self._borders[source]))
