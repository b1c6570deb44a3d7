"""Training rows and held-out documents of a run: one source, or a mixture of sources in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from gecko.data.loader import LaneRows, Loader, MixedLanes, OrderedRows, PackedRows, Row, Rows
from gecko.data.packing import ROW_LAYOUT, CorpusShare, TokenizedCorpus, permutation
from gecko.data.shards import ShardFolder, SplitShards, is_shard_folder, joined_digest
from gecko.data.sources import check_apart, check_disjoint, load_documents
from gecko.data.tokenizers import Tokenizer

BLOCK = 1024  # number of rows in which the proportions are exact
MIXTURE_STREAM = 1 << 32  # first random stream of the blocks, beyond the streams of epochs
VALIDATION_SEED = 0
"""Seed of the order of documents in a separate validation source: the same for every seed of a run."""


class MixedRows:
    """Rows of several sources: each block of ``BLOCK`` rows has ``counts[source]`` rows of a source, in random order.

    The rows of a source keep their order, so the source of row i and its index there are functions of the seed and i. A
    source that ends starts again. Raise ValueError if a weight is not above 0, or too small for one row per block.
    """

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float], seed: int) -> None:
        self.counts = counts = apportioned(
            weights, BLOCK, f"a source must have at least 1/{BLOCK} of all weights, or it may never be read; got {{}}."
        )
        self._sources = list(sources)

        @lru_cache(maxsize=2)
        def block_of(number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            """Return the source of every row of a block, and the number of earlier rows of that source in it."""
            origins = np.repeat(np.arange(len(counts)), counts)[permutation(BLOCK, seed, MIXTURE_STREAM + number)]
            ordinals = np.empty(BLOCK, np.int64)
            for source, count in enumerate(counts):
                ordinals[origins == source] = np.arange(count)
            return origins, ordinals

        self._block_of = block_of
        shares = zip(sources, counts, strict=True)
        # Number of rows before the first source starts again.
        self.rows_per_epoch = min(rows.rows_per_epoch * BLOCK // count for rows, count in shares)

    def row(self, index: int) -> Row:
        block, place = divmod(index, BLOCK)
        origins, ordinals = self._block_of(block)
        source = int(origins[place])
        return self._sources[source].row(block * self.counts[source] + int(ordinals[place]))


def apportioned(weights: Sequence[float], total: int, too_small: str) -> list[int]:
    """Divide ``total`` in proportion to the weights; shares of a half to 1, then the largest remainders, round up.
    ValueError: a weight is not above 0, or too small for one; ``too_small`` says so of the weights and the counts."""
    if not all(weight > 0 for weight in weights) or not math.isfinite(total * sum(weights)):
        raise ValueError(f"the weight of a source must be a number above 0; got {list(weights)}.")
    shares = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda n: (not 0.5 <= shares[n] < 1, counts[n] - shares[n]))
    for source in order[: total - sum(counts)]:
        counts[source] += 1
    if min(counts) == 0:
        raise ValueError(too_small.format(list(weights), counts))
    return counts


@dataclass(frozen=True)
class DataRequest:
    """Settings that turn the documents of any source into rows."""

    sequence_length: int
    validation_fraction: float
    """Fraction of the tokens that is held out, 0 to 1."""
    seed: int
    rank: int = 0
    ranks: int = 1
    """This process verifies every ``ranks``-th shard from ``rank`` on, and tokenizes every ``ranks``-th batch of texts;
    all processes together verify and tokenize all."""
    field: str = "text"
    """Field of records that holds the text."""
    layout: int = ROW_LAYOUT
    """Version of the rows, see ``ROW_LAYOUT``."""
    lanes: int | None = None
    """Rows of a batch, each of which reads consecutive rows (``LaneRows``). None: rows are shuffled."""


@dataclass(frozen=True)
class TrainingData:
    """Training rows and held-out documents."""

    name: str
    rows: Rows
    documents: int
    tokens: int
    """Number of training tokens."""
    held_out_documents: int
    held_out_tokens: int
    held_out: Callable[[int], TokenizedCorpus]
    """Returns the first N tokens, at least 2, of the held-out documents in random order, or all."""
    digest: str
    """SHA-256 of the ids of all documents, training and held-out."""
    divided: int = 0
    """Number of held-out documents that are the ends of documents that are trained on."""

    def loader(self, batch_size: int, *, parts: int = 1) -> Loader:
        """Return a loader of batches, each divided into ``parts`` equal groups of rows, one for each rank. Raise
        ValueError if a batch would contain a row twice."""
        if self.rows.rows_per_epoch < batch_size:
            raise ValueError(
                f"one batch takes {batch_size} rows and {self.name} has {self.rows.rows_per_epoch} before the first "
                f"comes again ({self.documents:,} documents, {self.tokens:,} tokens). Give more text, or set a smaller "
                "batch_size or sequence_length."
            )
        return Loader(self.rows, batch_size // parts)


Corpus = ShardFolder | TokenizedCorpus


class SplitDocuments:
    """The documents of a corpus in memory, divided as those of shards are by ``SplitShards``."""

    def __init__(self, corpus: TokenizedCorpus, request: DataRequest) -> None:
        self._training, held_out = corpus.split(request.validation_fraction, request.seed, request.layout)
        self._seed, self.digest, self.held_out_corpus = request.seed, corpus.digest(), held_out.head
        self.documents, self.tokens = len(self._training), self._training.num_tokens
        self.held_out_documents, self.held_out_tokens = len(held_out), held_out.num_tokens
        self.divided = self.documents + self.held_out_documents - len(corpus)

    def rows(self, sequence_length: int) -> PackedRows:
        return PackedRows(self._training, sequence_length, self._seed)


Split = SplitDocuments | SplitShards


def read_sources(
    source: str, sources: Sequence[str], tokenizer: Tokenizer, request: DataRequest, *, validation: str | None = None
) -> dict[str, Corpus | CorpusShare]:
    """Return the sources by name: folders of shards, and texts, which are tokenized into memory.

    Several processes divide the work: each verifies some of the shards and tokenizes some of the texts, which the
    caller joins. Arguments are those of ``open_training_data``. Raise FileNotFoundError or ValueError if a source
    cannot be read, is damaged, was made with another tokenizer, or shares files with ``validation``, or with another
    source while documents of both are held out.
    """
    names = [parse_source(item)[0] for item in sources] or [source]
    if validation is not None:
        check_apart(validation, names)
        names.append(validation)
    elif request.validation_fraction > 0 and sources:
        check_disjoint(names)
    found: dict[str, Corpus | CorpusShare] = {}
    for name in dict.fromkeys(names):
        if is_shard_folder(name):
            found[name] = folder = ShardFolder.open(name)
            folder.check_tokenizer(tokenizer)
            folder.verify(request.rank, request.ranks, stamped=True)
        elif request.ranks == 1:
            found[name] = TokenizedCorpus.build(load_documents(name, field=request.field), tokenizer)
        else:
            texts = load_documents(name, field=request.field)
            found[name] = CorpusShare.build(texts, tokenizer, request.rank, request.ranks)
    return found


def open_training_data(
    source: str,
    sources: Sequence[str],
    tokenizer: Tokenizer,
    request: DataRequest,
    *,
    validation: str | None = None,
    corpora: Mapping[str, Corpus] | None = None,
) -> TrainingData:
    """Return the rows of ``source``, or of the mixture ``sources`` if it is not empty, and the held-out documents.

    Args:
        source: a folder of token shards, or texts as for ``load_documents``, which are read into memory.
        sources: items ``SOURCE=WEIGHT``.
        validation: source of the held-out documents; all documents of ``source`` or ``sources`` are then trained on.
            None: ``request.validation_fraction`` of the tokens is held out.
        corpora: all sources by name, which several processes have read together. None: this process reads them.

    Raises:
        FileNotFoundError, ValueError: as for ``read_sources``; or a source is shorter than a row.
    """
    if corpora is None:
        alone = replace(request, rank=0, ranks=1)
        read = read_sources(source, sources, tokenizer, alone, validation=validation)
        corpora = {name: found for name, found in read.items() if not isinstance(found, CorpusShare)}
    mixture = [parse_source(item) for item in sources]
    if validation is None:
        return _open_training(source, mixture, corpora, request)
    training = _open_training(source, mixture, corpora, replace(request, validation_fraction=0))
    rest = _split(corpora[validation], replace(request, validation_fraction=1, seed=VALIDATION_SEED))
    return replace(
        training, held_out_documents=rest.held_out_documents, held_out_tokens=rest.held_out_tokens,
        held_out=rest.held_out_corpus, digest=joined_digest([training.digest, rest.digest]),
    )  # fmt: skip


def _open_training(
    source: str, mixture: Sequence[tuple[str, float]], corpora: Mapping[str, Corpus], request: DataRequest
) -> TrainingData:
    names, weights = zip(*(mixture or [(source, 1.0)]), strict=True)
    splits = [_split(corpora[name], request) for name in names]
    parts: list[OrderedRows] = [split.rows(request.sequence_length) for split in splits]
    rows: Rows = parts[0]
    held_out: Callable[[int], TokenizedCorpus] = splits[0].held_out_corpus
    name, digest = source, splits[0].digest
    if mixture:
        rows = mixed = MixedRows(parts, weights, request.seed)
        name = ", ".join(f"{name} ({count}/{BLOCK})" for name, count in zip(names, mixed.counts, strict=True))
        held_out = partial(_mixed_held_out, splits, mixed.counts)
        digest = joined_digest([split.digest for split in splits])
    if request.lanes is not None:
        too_few = (
            f"with data.carry_state each source must have a lane, and batch_size gives {request.lanes} lanes, in "
            "proportion to the weights {}; got the lanes {}. Try a larger batch_size, or fewer sources."
        )
        lanes = zip(parts, apportioned(weights, request.lanes, too_few), strict=True)
        rows = MixedLanes([LaneRows(part, count, request.seed) for part, count in lanes])
    counted = ("documents", "tokens", "held_out_documents", "held_out_tokens", "divided")
    totals = {field: sum(getattr(split, field) for split in splits) for field in counted}
    return TrainingData(name, rows, held_out=held_out, digest=digest, **totals)


def _mixed_held_out(splits: Sequence[Split], counts: Sequence[int], most: int) -> TokenizedCorpus:
    """Join held-out documents in the mixture's proportions, at most ``most`` tokens or what the sources allow."""
    shares = list(zip(splits, counts, strict=True))
    held = [split.held_out_tokens * BLOCK // count for split, count in shares]
    most = min(most, *held)
    parts = [split.held_out_corpus(max(2, -(-most * count // BLOCK))) for split, count in shares]
    return TokenizedCorpus.joined([part.document(index) for part in parts for index in range(len(part))])


def parse_source(item: str) -> tuple[str, float]:
    """Parse ``SOURCE=WEIGHT``; raise ValueError for anything else."""
    name, separator, weight = item.rpartition("=")
    try:
        if separator and name:
            return name, float(weight)
    except ValueError:
        pass
    raise ValueError(f"data.sources must read SOURCE=WEIGHT, separated by commas, as web=0.7,books=0.3; got {item!r}.")


def _split(corpus: Corpus, request: DataRequest) -> Split:
    if isinstance(corpus, ShardFolder):
        return SplitShards(corpus, request.validation_fraction, request.seed, request.layout)
    return SplitDocuments(corpus, request)
