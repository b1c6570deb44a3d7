"""A tokenized corpus in memory, and random orders that depend on the seed alone."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gecko.data.tokenizers import TokenIds, Tokenizer

ROUNDS = 6
_MASK = (1 << 64) - 1


class Shuffle:
    """Permutation of ``range(count)`` in constant memory; it depends on its arguments alone.

    A Feistel network permutes the next even power of two. A result outside ``count`` is mapped again until it is
    inside, fewer than four times on average.
    """

    def __init__(self, count: int, seed: int, stream: int) -> None:
        self._count, self._bits_of_half = count, max(1, -(-(count - 1).bit_length() // 2))
        # Raw draws: NumPy keeps them the same in all versions.
        self._keys: list[int] = np.random.PCG64((seed, stream)).random_raw(ROUNDS).tolist()

    def __getitem__(self, index: int) -> int:
        """Return the image of ``index``, which must be in ``range(count)``."""
        bits, mask = self._bits_of_half, (1 << self._bits_of_half) - 1
        place = self._count
        while place >= self._count:
            left, right = index >> bits, index & mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & mask)
            place = index = left << bits | right
        return place


def _mix(x: int) -> int:
    """Apply the finaliser of MurmurHash3: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ (x >> 33)


ROW_LAYOUT = 3
"""Version of the rule that makes rows of documents; a run keeps the version that it started with.

In layout 1, the rows of token shards leave out the tokens at the end of the corpus that do not fill a row; later the
last row is padded. (In memory, they are left out in all layouts, and are others in every epoch.) Up to layout 2, the
held-out fraction is that of the number of documents; since layout 3 it is that of the tokens.
"""
BATCH_CHARACTERS = 1 << 20
LEAST = 3  # fewest tokens of a document with text: its start, one token and its end
SPLIT_STREAM = 0  # random stream of the split; epochs use the streams after it


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
    def joined(cls, documents: Sequence[NDArray[Any]]) -> TokenizedCorpus:
        """Concatenate documents, which include their border tokens."""
        return cls.of_whole(np.concatenate(documents).astype(np.uint32), [len(document) for document in documents])

    @classmethod
    def build(cls, texts: Iterable[str], tokenizer: Tokenizer) -> TokenizedCorpus:
        """Tokenize ``texts``; those without tokens are dropped. Raise ValueError if no text has tokens."""
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

    def split(
        self, validation_fraction: float, seed: int, layout: int = ROW_LAYOUT
    ) -> tuple[TokenizedCorpus, TokenizedCorpus]:
        """Return training and validation documents; random documents are held out, see ``held_out_part``.

        Validation documents are in random order, so that any first part is a sample of all. If one is the end of a
        document that is trained on, it is the last, with border tokens of its own. Raise ValueError if there is too
        little text to divide, or the fraction is outside 0..1.
        """
        order = permutation(len(self), seed, SPLIT_STREAM)
        count, tail = held_out_part(self.lengths[order], validation_fraction, layout, LEAST)
        kept, chosen = np.sort(order[count:]), order[:count]
        training, held_out = (
            TokenizedCorpus(self.tokens, self.offsets[part], self.lengths[part]) for part in (kept, chosen)
        )
        if tail:
            document = self.document(order[count])
            end = np.concatenate([document[:1], document[1 - tail :]])
            held_out = self.joined([*(held_out.document(index) for index in range(count)), end])
            training.lengths[np.searchsorted(kept, order[count])] -= tail - 1
        return training, held_out

    def head(self, max_tokens: int) -> TokenizedCorpus:
        """Return the first ``max_tokens`` tokens of the corpus; the last document may be cut. Raise ValueError if they
        are too few for a document's first text token."""
        if max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, a document's start and one more token; got {max_tokens}.")
        before = np.cumsum(self.lengths) - self.lengths
        lengths = np.minimum(self.lengths, max_tokens - before)
        # A document that is cut to its first border token has no targets.
        count = np.count_nonzero(lengths > 1)
        return TokenizedCorpus(self.tokens, self.offsets[:count], lengths[:count])


@dataclass(frozen=True)
class CorpusShare:
    """The share of a corpus that one of several processes tokenizes: every n-th batch of the texts."""

    parts: list[TokenizedCorpus]  # one corpus for each batch, possibly without documents
    texts: str  # SHA-256 of the tokenizer and of all texts of the corpus, which every process reads
    dtype: np.dtype[np.unsignedinteger]  # type of the ids

    @classmethod
    def build(cls, texts: Iterable[str], tokenizer: Tokenizer, rank: int, ranks: int) -> CorpusShare:
        """Read all ``texts``, and tokenize every ``ranks``-th batch from ``rank`` on."""
        digest, parts = hashlib.sha256(tokenizer.digest.encode()), []
        for number, batch in enumerate(batches(texts)):
            for content in map(str.encode, batch):
                digest.update(len(content).to_bytes(8, "little") + content)
            if number % ranks == rank:
                parts.append(_tokenized([batch], tokenizer))
        return cls(parts, digest.hexdigest(), token_dtype(tokenizer.vocab_size))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned type that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into batches of about ``BATCH_CHARACTERS``; empty texts are dropped."""
    batch, characters = list[str](), 0
    for text in filter(None, texts):
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def joined_ids(texts: Iterable[TokenIds], tokenizer: Tokenizer) -> tuple[bytes, list[int]]:
    """Return the ids of texts, each with its border tokens, and the lengths; texts without tokens are dropped."""
    dtype, documents = token_dtype(tokenizer.vocab_size), [ids for ids in texts if len(ids)]
    start, end = (np.array([x], dtype).tobytes() for x in (tokenizer.document_start, tokenizer.document_end))
    joined = b"".join(start + ids.astype(dtype).tobytes() + end for ids in documents)
    return joined, [len(ids) + 2 for ids in documents]


def _tokenized(groups: Iterable[list[str]], tokenizer: Tokenizer) -> TokenizedCorpus:
    tokens, lengths = bytearray(), array("q")
    for batch in groups:
        ids, of_documents = joined_ids(tokenizer.encode_batch(batch), tokenizer)
        tokens += ids
        lengths.extend(of_documents)
    return TokenizedCorpus.of_whole(np.frombuffer(tokens, token_dtype(tokenizer.vocab_size)), lengths)


def held_out_part(lengths: NDArray[np.int64], fraction: float, layout: int, least: int) -> tuple[int, int]:
    """Return how many documents, from the first on, are held out whole, and how many tokens of the next one's end.

    The next document is divided only if the whole ones are less than half of what is to be held out. See
    ``held_out_count`` for the other arguments.
    """
    total, documents = int(lengths.sum()), len(lengths)
    if fraction in (0, 1):
        return documents if fraction else 0, 0
    if layout < 3 and documents > 1:
        return held_out_count(documents, fraction, layout, 1), 0
    if layout < 3:
        return 0, held_out_count(total - 2, fraction, layout, 1) + 2
    budget, ends = held_out_count(total, fraction, layout, least), np.cumsum(lengths)
    count = int(np.searchsorted(ends, budget, side="right"))
    left = budget - (int(ends[count - 1]) if count else 0)
    return count, left if 2 * left > budget and left >= least else 0


def held_out_count(total: int, fraction: float, layout: int, least: int) -> int:
    """Return how many of ``total`` tokens, or documents up to layout 2, are held out: at least ``least``. Raise
    ValueError if there are not more than ``least``, or the fraction is outside 0..1."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"validation_fraction must lie between 0 and 1; got {fraction}. Try 0.05.")
    if fraction in (0, 1):
        return total if fraction else 0
    if total <= least:
        raise ValueError(
            f"a source must have at least {least + 1} tokens, starts and ends of documents included, to hold a part of "
            f"them out; got {total}. Give more text."
        )
    return min(max(round(fraction * total), 1), total - 1) if layout < 3 else max(int(fraction * total), least)


def permutation(count: int, seed: int, stream: int) -> NDArray[np.int64]:
    """Return a random order of ``range(count)`` that depends on the arguments alone; streams are independent.

    It sorts raw draws, which NumPy keeps the same in all versions. Raise ValueError if ``seed`` is negative.
    """
    if seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0; got {seed}.")
    return np.argsort(np.random.PCG64((seed, stream)).random_raw(count), kind="stable")
