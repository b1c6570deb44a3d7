"""A tokenized corpus in memory, and random orders that depend on the seed alone."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gecko.data.tokenizers import Tokenizer

ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Shuffle:
    """Permutation of ``range(count)`` in constant memory; it depends on its arguments alone.

    A Feistel network permutes the next even power of two. A result outside ``count`` is mapped again until it is
    inside, fewer than four times on average.
    """

    count: int
    half: int
    """Bits of each half of an index."""
    keys: tuple[int, ...]

    @classmethod
    def of(cls, count: int, seed: int, stream: int) -> Shuffle:
        # Raw draws: NumPy keeps them the same in all versions.
        keys = np.random.PCG64((seed, stream)).random_raw(ROUNDS)
        return cls(count, max(1, -(-(count - 1).bit_length() // 2)), tuple(int(key) for key in keys))

    def __getitem__(self, index: int) -> int:
        """Return the image of ``index``, which must be in ``range(count)``."""
        place = self._permute(index)
        while place >= self.count:
            place = self._permute(place)
        return place

    def _permute(self, index: int) -> int:
        mask = (1 << self.half) - 1
        left, right = index >> self.half, index & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self.half | right


def _mix(x: int) -> int:
    """Apply the finaliser of MurmurHash3: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ (x >> 33)


BATCH_CHARACTERS = 1 << 20
SPLIT_STREAM = 0
"""Random stream of the split; epochs use the streams after it."""


@dataclass(frozen=True)
class TokenizedCorpus:
    """Documents as token ids, each with its border tokens: document_start, text, document_end.

    Parts of a corpus share its ``tokens``.
    """

    tokens: NDArray[np.unsignedinteger]
    """(tokens of all documents,), uint16 if the vocabulary fits."""
    offsets: NDArray[np.int64]
    """(documents,) start of each document in ``tokens``."""
    lengths: NDArray[np.int64]
    """(documents,) tokens of each document, border tokens included; a cut document has no end token."""

    @classmethod
    def of_whole(cls, tokens: NDArray[np.unsignedinteger], lengths: ArrayLike) -> TokenizedCorpus:
        """Build a corpus of documents that are concatenated in ``tokens``."""
        sizes = np.asarray(lengths, np.int64)
        return cls(tokens, np.cumsum(sizes) - sizes, sizes)

    @classmethod
    def build(cls, texts: Iterable[str], tokenizer: Tokenizer) -> TokenizedCorpus:
        """Tokenize ``texts``; those without tokens are dropped.

        Raises:
            ValueError: no text has tokens.
        """
        corpus = _tokenized(batches(texts), tokenizer)
        if not len(corpus):
            raise ValueError("a corpus must hold at least one document with text; got none.")
        return corpus

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, border tokens included."""
        return int(self.lengths.sum())

    def document(self, index: int) -> NDArray[np.int64]:
        """Return the ids of one document, border tokens included."""
        begin = self.offsets[index]
        return self.tokens[begin : begin + self.lengths[index]].astype(np.int64)

    def digest(self) -> str:
        """Return a SHA-256 of all ids and document lengths: equal for equal texts, order and tokenizer."""
        found = hashlib.sha256(np.ascontiguousarray(self.tokens).data)
        found.update(self.lengths.tobytes())
        return found.hexdigest()

    def split(self, validation_fraction: float, seed: int) -> tuple[TokenizedCorpus, TokenizedCorpus]:
        """Return training and validation documents; ``held_out_count`` random documents are held out.

        Validation documents are in random order, so that any first part is a sample of all. Of a single document the
        end is held out, as a document of its own.

        Raises:
            ValueError: a single document of one token, or a fraction outside 0..1.
        """
        if len(self) == 1 and 0 < validation_fraction < 1:
            return self._split_only_document(validation_fraction)
        order = permutation(len(self), seed, SPLIT_STREAM)
        count = held_out_count(len(self), validation_fraction)
        return self._select(np.sort(order[count:])), self._select(order[:count])

    def _split_only_document(self, validation_fraction: float) -> tuple[TokenizedCorpus, TokenizedCorpus]:
        """Return the document without its end, and the end between border tokens."""
        text, begin = int(self.lengths[0]) - 2, int(self.offsets[0])
        if text < 2:
            raise ValueError(
                "a single document must have at least 2 tokens to hold out its end; got 1. Give more text."
            )
        held = min(max(round(validation_fraction * text), 1), text - 1)
        tail = self.tokens[begin + 1 + text - held : begin + int(self.lengths[0])]
        end = np.concatenate([self.tokens[begin : begin + 1], tail])
        rest = TokenizedCorpus(self.tokens, self.offsets, np.array([1 + text - held]))
        return rest, TokenizedCorpus.of_whole(end, [len(end)])

    def head(self, max_tokens: int) -> TokenizedCorpus:
        """Return the first ``max_tokens`` tokens of the corpus; the last document may be cut.

        Raises:
            ValueError: ``max_tokens`` is too small for a document's first text token.
        """
        if max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, a document's start and one more token; got {max_tokens}.")
        before = np.cumsum(self.lengths) - self.lengths
        lengths = np.minimum(self.lengths, max_tokens - before)
        # A document that is cut to its first border token has no targets.
        count = np.count_nonzero(lengths > 1)
        return TokenizedCorpus(self.tokens, self.offsets[:count], lengths[:count])

    def _select(self, documents: NDArray[np.int64]) -> TokenizedCorpus:
        return TokenizedCorpus(self.tokens, self.offsets[documents], self.lengths[documents])


@dataclass(frozen=True)
class CorpusShare:
    """The share of a corpus that one of several processes tokenizes: every n-th batch of the texts."""

    parts: list[TokenizedCorpus]
    """One corpus for each batch, possibly without documents."""
    texts: str
    """SHA-256 of the tokenizer and of all texts of the corpus, which every process reads."""
    dtype: np.dtype[np.unsignedinteger]
    """Type of the ids."""

    @classmethod
    def build(cls, texts: Iterable[str], tokenizer: Tokenizer, rank: int, ranks: int) -> CorpusShare:
        """Read all ``texts``, and tokenize every ``ranks``-th batch from ``rank`` on."""
        digest, parts = hashlib.sha256(tokenizer.digest.encode()), []
        for number, batch in enumerate(batches(texts)):
            for text in batch:
                content = text.encode("utf-8")
                digest.update(len(content).to_bytes(8, "little") + content)
            if number % ranks == rank:
                parts.append(_tokenized([batch], tokenizer))
        return cls(parts, digest.hexdigest(), _dtype(tokenizer))


def _dtype(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def _tokenized(groups: Iterable[list[str]], tokenizer: Tokenizer) -> TokenizedCorpus:
    """Tokenize batches of texts; texts without tokens are dropped."""
    dtype = _dtype(tokenizer)
    tokens, lengths = bytearray(), array("q")
    start = np.array([tokenizer.document_start], dtype).tobytes()
    end = np.array([tokenizer.document_end], dtype).tobytes()
    for batch in groups:
        for ids in tokenizer.encode_batch(batch):
            if len(ids):
                tokens += start + ids.astype(dtype).tobytes() + end
                lengths.append(len(ids) + 2)
    return TokenizedCorpus.of_whole(np.frombuffer(tokens, dtype), lengths)


def held_out_count(documents: int, validation_fraction: float) -> int:
    """Return how many documents are held out: none for 0, all for 1, otherwise at least one and not all.

    Raises:
        ValueError: fewer than two documents to divide, or a fraction outside 0..1.
    """
    if not 0 <= validation_fraction <= 1:
        raise ValueError(f"validation_fraction must lie between 0 and 1; got {validation_fraction}. Try 0.05.")
    if validation_fraction in (0, 1):
        return documents if validation_fraction else 0
    if documents < 2:
        raise ValueError(
            f"token shards must hold at least 2 documents to be split into training and validation; got {documents}. "
            "Name the text file itself as the source, whose end is then held out, or add documents."
        )
    return min(max(round(validation_fraction * documents), 1), documents - 1)


def permutation(count: int, seed: int, stream: int) -> NDArray[np.int64]:
    """Return a random order of ``range(count)`` that depends on the arguments alone; streams are independent.

    It sorts raw draws, which NumPy keeps the same in all versions, unlike ``permutation``.

    Raises:
        ValueError: ``seed`` is negative.
    """
    if seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0; got {seed}.")
    draws = np.random.PCG64((seed, stream)).random_raw(count)
    return np.argsort(draws, kind="stable")


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into batches of about ``BATCH_CHARACTERS``; empty texts are dropped."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if not text:
            continue
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
