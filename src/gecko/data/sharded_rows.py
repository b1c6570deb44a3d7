"""Rows of a corpus that is mapped from disk: memory does not grow with the corpus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gecko.data.loader import Row, make_row, rows_in
from gecko.data.packing import SPLIT_STREAM, TokenizedCorpus, held_out_count, permutation
from gecko.data.shards import Shard, ShardFolder
from gecko.data.shuffle import Shuffle

HELD_OUT_PLACE, HELD_OUT_ORDER = 1, 2
FIRST_EPOCH = 3
"""Random streams beside ``SPLIT_STREAM``: where the held-out runs lie, in which order their documents come, epochs."""


@dataclass(frozen=True)
class Range:
    """Whole documents of a shard that lie side by side."""

    shard: Shard
    begin: int
    end: int
    """Documents ``begin`` up to ``end``."""

    @property
    def first_token(self) -> int:
        return self.shard.document_start(self.begin)

    @property
    def tokens(self) -> int:
        return self.shard.document_start(self.end) - self.first_token


class SplitShards:
    """The documents of a folder of shards, divided into training and held-out ones.

    Each shard holds out one run of neighbouring documents that begins at a random one, so that what is held out
    is a sample of the whole corpus, and finding it takes no list of documents.

    Raises:
        ValueError: fewer than two documents to divide, or a fraction outside 0..1.
    """

    def __init__(self, folder: ShardFolder, validation_fraction: float, seed: int) -> None:
        self.seed = seed
        held_out = _held_out_runs(folder, validation_fraction, seed)
        self.held_out = [run for run in held_out if run.begin < run.end]
        self.training = [
            part
            for run in held_out
            for part in (Range(run.shard, 0, run.begin), Range(run.shard, run.end, run.shard.record.documents))
            if part.begin < part.end
        ]
        self.documents = sum(part.end - part.begin for part in self.training)
        self.tokens = sum(part.tokens for part in self.training)
        self.held_out_documents = sum(run.end - run.begin for run in self.held_out)
        self.held_out_tokens = sum(run.tokens for run in self.held_out)
        self.digest = folder.digest

    def rows(self, sequence_length: int) -> ShardedRows:
        """Of the training documents."""
        return ShardedRows(self, sequence_length)

    def held_out_corpus(self, max_tokens: int) -> TokenizedCorpus:
        """The first ``max_tokens`` tokens of the held-out documents in random order, in memory."""
        before = np.cumsum([0, *(run.end - run.begin for run in self.held_out)])
        order = Shuffle.of(self.held_out_documents, self.seed, HELD_OUT_ORDER)
        documents: list[NDArray[np.unsignedinteger]] = []
        text_bytes: list[int] = []
        count = 0
        for index in range(self.held_out_documents):
            place = order[index]
            which = int(np.searchsorted(before, place, side="right")) - 1
            run = self.held_out[which]
            document = run.begin + place - int(before[which])
            begin, end = run.shard.document_start(document), run.shard.document_start(document + 1)
            documents.append(np.array(run.shard.tokens[begin:end]))
            text_bytes.append(int(run.shard.text_bytes[document]))
            count += end - begin
            if count >= max_tokens:
                break
        lengths = [len(document) for document in documents]
        return TokenizedCorpus.of_whole(np.concatenate(documents), lengths, text_bytes).head(max_tokens)


class ShardedRows:
    """Rows of the training documents of shards.

    The documents lie end to end as they were written, and are cut into rows of ``sequence_length + 1`` tokens, the
    last of which is the first of the next row; what does not fill a last row is left out. Every epoch takes the
    rows in a random order of its own, over the whole corpus.

    Raises:
        ValueError: the training documents are shorter than a row, or the length is out of range.
    """

    def __init__(self, split: SplitShards, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.rows_per_epoch = rows_in(split.tokens, sequence_length)
        self._ranges = split.training
        self._borders = np.cumsum([0, *(part.tokens for part in split.training)])
        self._seed = split.seed

    def row(self, index: int) -> Row:
        epoch, row = divmod(index, self.rows_per_epoch)
        place = Shuffle.of(self.rows_per_epoch, self._seed, FIRST_EPOCH + epoch)[row]
        begin = place * self.sequence_length
        tokens, segments = self._read(begin, begin + self.sequence_length + 1)
        return make_row(tokens, segments, self.sequence_length)

    def _read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens ``begin`` up to ``end`` of all ranges end to end, and the numbers of their documents, from 0."""
        tokens, segments, documents = [], [], 0
        which = int(np.searchsorted(self._borders, begin, side="right")) - 1
        while begin < end:
            part, offset = self._ranges[which], int(self._borders[which])
            stop = min(end, int(self._borders[which + 1]))
            first = part.first_token - offset
            ids, numbers = _read_shard(part.shard, first + begin, first + stop)
            tokens.append(ids)
            segments.append(numbers + documents)
            documents += int(numbers[-1]) + 1
            begin, which = stop, which + 1
        return np.concatenate(tokens), np.concatenate(segments)


def _read_shard(shard: Shard, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens ``begin`` up to ``end`` of a shard, and the numbers of their documents, from 0."""
    # Of the index's own type: NumPy would copy the whole index to compare it with another one.
    first = int(shard.ends.searchsorted(np.uint64(begin), side="right"))
    last = int(shard.ends.searchsorted(np.uint64(end - 1), side="right"))
    ends = np.minimum(np.array(shard.ends[first : last + 1], dtype=np.int64), end)
    counts = np.diff(ends, prepend=begin)
    return shard.tokens[begin:end].astype(np.int64), np.repeat(np.arange(last + 1 - first), counts)


def _held_out_runs(folder: ShardFolder, fraction: float, seed: int) -> list[Range]:
    """For every shard, the documents that are held out of it; there may be none.

    Of the shards in random order, the first k hold out the fraction of their documents, rounded, for every k.
    """
    total = held_out_count(folder.documents, fraction)
    order = permutation(len(folder.shards), seed, SPLIT_STREAM)
    sizes = np.array([shard.record.documents for shard in folder.shards])
    upto = np.cumsum(sizes[order])
    # In whole numbers, so that no rounding takes more from a shard than it has.
    counts = np.diff((upto.astype(object) * total + folder.documents // 2) // folder.documents, prepend=0)
    places = np.random.PCG64((seed, HELD_OUT_PLACE)).random_raw(len(folder.shards))
    runs: dict[int, Range] = {}
    for shard, count in zip(order.tolist(), map(int, counts), strict=True):
        begin = int(places[shard]) % (int(sizes[shard]) - count + 1)
        runs[shard] = Range(folder.shards[shard], begin, begin + count)
    return [runs[shard] for shard in range(len(folder.shards))]
