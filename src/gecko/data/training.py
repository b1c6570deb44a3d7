"""What a run trains on and what it is tested on, from whatever its data settings name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gecko.data.loader import Loader, Rows
from gecko.data.mixture import BLOCK, MixedRows
from gecko.data.overlap import check_apart, check_disjoint
from gecko.data.packing import TokenizedCorpus
from gecko.data.split import Split, split_source
from gecko.data.tokenizers import Tokenizer

VALIDATION_SEED = 0
"""Of the order of held-out documents that have a source of their own: the same ones for every seed of a run."""


@dataclass(frozen=True)
class DataRequest:
    """How documents become rows, whatever their source."""

    sequence_length: int
    validation_fraction: float
    """Part of the documents held out: 0 for none, 1 for all."""
    seed: int
    rank: int = 0
    ranks: int = 1
    """This process verifies every ``ranks``-th shard from ``rank`` on; together they verify all."""
    field: str = "text"
    """Of records, the one that holds the text."""


@dataclass(frozen=True)
class TrainingData:
    """The training rows and the held-out documents of a source."""

    name: str
    rows: Rows
    documents: int
    tokens: int
    """For training."""
    held_out_documents: int
    held_out_tokens: int
    held_out: Callable[[int], TokenizedCorpus]
    """The first so many tokens of the held-out documents in random order, or all; at least 2."""
    digest: str
    """Of all documents as ids, those to train on and those held out."""

    def loader(self, batch_size: int, *, parts: int = 1) -> Loader:
        """Batches in ``parts`` equal groups of rows, one after the other: what one of so many ranks takes at a time.

        ValueError where one batch would hold a row twice.
        """
        if self.rows.rows_per_epoch < batch_size:
            raise ValueError(
                f"one batch takes {batch_size} rows and {self.name} has {self.rows.rows_per_epoch} before the first "
                f"comes again ({self.documents:,} documents, {self.tokens:,} tokens). Give more text, or set a smaller "
                "batch_size or sequence_length."
            )
        return Loader(self.rows, batch_size // parts)


def open_training_data(
    source: str,
    sources: Sequence[str],
    tokenizer: Tokenizer,
    request: DataRequest,
    *,
    validation: str | None = None,
) -> TrainingData:
    """The data of ``source``, or of the mixture ``sources`` where there is one.

    Args:
        source: a folder of token shards, or what ``load_documents`` takes, which is read into memory.
        sources: ``SOURCE=WEIGHT`` each.
        validation: a source of the held-out documents; all of ``source`` or ``sources`` are then trained on. None:
            ``request.validation_fraction`` of those are held out.

    Raises:
        FileNotFoundError, ValueError: a source cannot be read or is damaged, was made with another tokenizer, is too
            short for a row, or has files in common with ``validation`` or, where documents are held out of both, with
            another source.
    """
    mixture = [parse_source(item) for item in sources]
    if validation is None:
        if request.validation_fraction > 0:
            check_disjoint([name for name, _ in mixture])
        return _open_training(source, mixture, tokenizer, request)
    check_apart(validation, [name for name, _ in mixture] or [source])
    training = _open_training(source, mixture, tokenizer, replace(request, validation_fraction=0))
    rest = _split(validation, tokenizer, replace(request, validation_fraction=1, seed=VALIDATION_SEED))
    return replace(
        training,
        held_out_documents=rest.held_out_documents,
        held_out_tokens=rest.held_out_tokens,
        held_out=rest.held_out_corpus,
        digest=_joined_digest([training.digest, rest.digest]),
    )


def _open_training(
    source: str, mixture: Sequence[tuple[str, float]], tokenizer: Tokenizer, request: DataRequest
) -> TrainingData:
    if not mixture:
        return _open_source(source, tokenizer, request)
    opened = [_open_source(name, tokenizer, request) for name, _ in mixture]
    rows = MixedRows([data.rows for data in opened], [weight for _, weight in mixture], request.seed)
    shares = list(zip(opened, rows.counts, strict=True))
    return TrainingData(
        name=", ".join(f"{data.name} ({count}/{BLOCK})" for data, count in shares),
        rows=rows,
        documents=sum(data.documents for data in opened),
        tokens=sum(data.tokens for data in opened),
        held_out_documents=sum(data.held_out_documents for data in opened),
        held_out_tokens=sum(data.held_out_tokens for data in opened),
        held_out=lambda most: _mixed_held_out(shares, most),
        digest=_joined_digest([data.digest for data in opened]),
    )


def _mixed_held_out(shares: Sequence[tuple[TrainingData, int]], most: int) -> TokenizedCorpus:
    """In the proportions of the mixture, so no more than the source allows that holds out least for its share."""
    held = [data.held_out_tokens * BLOCK // count for data, count in shares]
    most = min(most, *held)
    return _joined([data.held_out(max(2, -(-most * count // BLOCK))) for data, count in shares])


def parse_source(item: str) -> tuple[str, float]:
    """``SOURCE=WEIGHT``; ValueError for anything else."""
    name, separator, weight = item.rpartition("=")
    try:
        if separator and name:
            return name, float(weight)
    except ValueError:
        pass
    raise ValueError(f"data.sources must read SOURCE=WEIGHT, separated by commas, as web=0.7,books=0.3; got {item!r}.")


def _open_source(source: str, tokenizer: Tokenizer, request: DataRequest) -> TrainingData:
    split = _split(source, tokenizer, request)
    return TrainingData(
        source, split.rows(request.sequence_length), split.documents, split.tokens, split.held_out_documents,
        split.held_out_tokens, split.held_out_corpus, split.digest,
    )  # fmt: skip


def _split(source: str, tokenizer: Tokenizer, request: DataRequest) -> Split:
    return split_source(
        source, tokenizer, request.validation_fraction, request.seed,
        field=request.field, rank=request.rank, ranks=request.ranks,
    )  # fmt: skip


def _joined_digest(digests: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _joined(corpora: Sequence[TokenizedCorpus]) -> TokenizedCorpus:
    """The documents of all, laid end to end."""
    documents = [corpus.document(index) for corpus in corpora for index in range(len(corpus))]
    tokens = np.concatenate(documents).astype(np.uint32)
    lengths, text_tokens, text_bytes = (
        np.concatenate([getattr(corpus, name) for corpus in corpora])
        for name in ("lengths", "text_tokens", "text_bytes")
    )
    return TokenizedCorpus(tokens, np.cumsum(lengths) - lengths, lengths, text_tokens, text_bytes)
