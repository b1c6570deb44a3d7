"""Bytes of text that token ids stand for, and characters that a tokenizer loses.

Bytes belong to ids, so those of all parts of a text add up to those of the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gecko.data.loader import IGNORED, Batch
from gecko.data.text_stream import REPLACEMENT
from gecko.data.tokenizers import ByteTokenizer, TokenIds, Tokenizer

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_UNKNOWN = "\U0010fffdꙮ\u9f98"
"""Characters that few vocabularies hold."""


class TokenBytes:
    """Bytes in UTF-8 that every id of a tokenizer adds to the decoded text; special ids add none.

    An id that is part of a character counts the bytes of its part.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        word = next((index for index in ids if tokenizer.decode([index]).isalnum()), tokenizer.document_end)
        alone, twice = (len(tokenizer.decode([word] * count).encode()) for count in (1, 2))
        self._inside = np.array([_added(tokenizer, [word], index, [word], twice) for index in ids])
        # Many tokenizers write no space before the first word of a text.
        self._first = np.array([_added(tokenizer, [], index, [word], twice - alone) for index in ids])
        self._special = np.zeros(len(ids), np.bool_)
        # A text encodes to a special id only where a character is unknown, and goes on after it.
        self._special[sorted(tokenizer.special_ids - set(tokenizer.encode(_UNKNOWN).tolist()))] = True
        self._first[self._special] = 0

    def of_text(self, ids: TokenIds, *, begins: bool = True) -> int:
        """Return the bytes of a text, (length,), or of the rest of one that ``begins`` before."""
        first = int(self._first[ids[0]] - self._inside[ids[0]]) if begins and len(ids) else 0
        return int(self._inside[ids].sum()) + first

    def of_targets(self, batch: Batch) -> Tensor:
        """Return the bytes of the targets of every row, (rows,) int64."""
        tokens, targets = batch.tokens.numpy(), batch.targets.numpy()
        begins, none = self._special[tokens], targets == IGNORED
        begins[:, 1:] |= none[:, :-1]  # the first token of an answer
        ids = np.where(none, 0, targets)
        counts = np.where(begins, self._first[ids], self._inside[ids])
        return torch.from_numpy(np.where(none, 0, counts).sum(1))


@lru_cache(maxsize=4)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the bytes of a tokenizer's ids; a large vocabulary takes seconds."""
    return TokenBytes(tokenizer)


def _added(tokenizer: Tokenizer, before: list[int], index: int, after: list[int], without: int) -> int:
    text, piece = tokenizer.decode([*before, index, *after]), tokenizer.piece(index)
    if REPLACEMENT in text and REPLACEMENT not in piece:
        return 1 if _BYTE.fullmatch(piece) else len(piece)  # byte-level pieces have a letter for each byte
    return len(text.encode()) - without


SAMPLE = 1 << 19
"""Characters of a sample of texts."""
LARGEST_LOSS = 1e-3


def check_loss(tokenizer: Tokenizer, texts: Iterable[str], *, allowed: bool) -> str:
    """Return the share of characters that a tokenizer loses, in words; an empty text if it loses none.

    Up to ``SAMPLE`` characters are encoded and decoded. The normalisation that the tokenizer declares is no loss.

    Raises:
        ValueError: it loses more than ``LARGEST_LOSS``, which is not ``allowed``.
    """
    sample, total, lost = list[str](), 0, Counter[str]()
    for text in texts if not isinstance(tokenizer, ByteTokenizer) else ():
        sample.append(text[: SAMPLE - total])
        total += len(sample[-1])
        if total == SAMPLE:
            break
    for text, ids in zip(sample, tokenizer.encode_batch(sample), strict=True):
        if (kept := tokenizer.decode(ids)) != text:
            lost += Counter(tokenizer.normalize(text)) - Counter(tokenizer.normalize(kept))
    if not lost:
        return ""
    named = ", ".join(repr(character) for character, _ in lost.most_common(3))
    share = f"{lost.total() / total:.3%} of the characters, most often {named}"
    if lost.total() > LARGEST_LOSS * total and not allowed:
        raise ValueError(
            f"a tokenizer must keep {1 - LARGEST_LOSS:.1%} of the characters; {tokenizer.name!r} loses {share} (in a "
            f"sample of {total:,}). Take one that falls back to bytes, or set data.allow_loss=true (gecko tokenize: "
            "--allow-loss)."
        )
    return f"the tokenizer {tokenizer.name!r} loses {share} (in a sample of {total:,})"
