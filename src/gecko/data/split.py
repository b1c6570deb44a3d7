"""The documents of one source, divided into training and held-out ones."""

from __future__ import annotations

from typing import Protocol

from gecko.data.corpus import load_documents
from gecko.data.loader import PackedRows, Rows
from gecko.data.packing import TokenizedCorpus
from gecko.data.sharded_rows import SplitShards
from gecko.data.shards import ShardFolder, is_shard_folder
from gecko.data.tokenizers import Tokenizer


class Split(Protocol):
    documents: int
    tokens: int
    """For training."""
    held_out_documents: int
    held_out_tokens: int
    digest: str
    """Of all documents of the source as ids, in their order."""

    def rows(self, sequence_length: int) -> Rows:
        """Of the training documents; ValueError where they are shorter than a row."""

    def held_out_corpus(self, max_tokens: int) -> TokenizedCorpus:
        """The first so many tokens of the held-out documents in random order, or all; at least 2."""


class SplitDocuments:
    """Of a corpus in memory."""

    def __init__(self, corpus: TokenizedCorpus, validation_fraction: float, seed: int) -> None:
        self._training, self._held_out = corpus.split(validation_fraction, seed)
        self._seed = seed
        self.digest = corpus.digest()
        self.documents, self.tokens = len(self._training), self._training.num_tokens
        self.held_out_documents, self.held_out_tokens = len(self._held_out), self._held_out.num_tokens

    def rows(self, sequence_length: int) -> PackedRows:
        return PackedRows(self._training, sequence_length, self._seed)

    def held_out_corpus(self, max_tokens: int) -> TokenizedCorpus:
        return self._held_out.head(max_tokens)


def split_source(
    source: str,
    tokenizer: Tokenizer,
    validation_fraction: float,
    seed: int,
    *,
    field: str = "text",
    rank: int = 0,
    ranks: int = 1,
) -> Split:
    """Open a folder of token shards, or read into memory what ``load_documents`` takes.

    Args:
        validation_fraction: part of the documents that is held out; 0: none, 1: all.
        field: of records, the one that holds the text.
        rank, ranks: this process verifies every ``ranks``-th shard from ``rank`` on; together they verify all.

    Raises:
        FileNotFoundError, ValueError: the source cannot be read, is damaged or was made with another tokenizer.
    """
    if not is_shard_folder(source):
        corpus = TokenizedCorpus.build(load_documents(source, field=field), tokenizer)
        return SplitDocuments(corpus, validation_fraction, seed)
    folder = ShardFolder.open(source)
    folder.check_tokenizer(tokenizer)
    folder.verify(rank, ranks)
    return SplitShards(folder, validation_fraction, seed)
