"""Text and tokens: streams of any length in both directions, bytes that ids stand for, and characters that are lost.

Bytes belong to ids, so those of all parts of a text add up to those of the text.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gecko.data.loader import IGNORED, Batch
from gecko.data.readers import BYTE_ORDER_MARK
from gecko.data.tokenizers import ByteTokenizer, TokenIds, Tokenizer, text_ids
from gecko.state import GeckoState

BLOCK = 1 << 16  # number of characters that are encoded at once
CONTEXT = 256  # number of characters on both sides that decide whether tokens end at a position
REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # largest number of bytes, and so of ids, of a UTF-8 character
SAMPLE = 1 << 19  # characters of a sample of texts
LARGEST_LOSS = 1e-3
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_UNKNOWN = "\U0010fffdꙮ\u9f98"  # characters that few vocabularies hold


def encode_stream(
    tokenizer: Tokenizer, content: Iterable[bytes], where: str, *, block: int = BLOCK
) -> Iterator[Tensor]:
    """Encode a text given in pieces of bytes. Yield 1-D int64 tensors that join to the ids of the whole text.

    The bytes tokenizer accepts any bytes; the others raise ValueError if the content is not UTF-8, with the name
    ``where`` of the text and the offset of the byte. ``block`` is the number of characters that are encoded at once.
    """
    if isinstance(tokenizer, ByteTokenizer):
        for piece in content:
            yield torch.from_numpy(np.frombuffer(piece, dtype=np.uint8).astype(np.int64))
        return
    before, pending = "", ""
    for text in _decode(content, where):
        pending += text
        while len(pending) >= block + CONTEXT:
            cut = _find_border(tokenizer, before, pending, block)
            yield _encode_after(tokenizer, before, pending[:cut])
            before, pending = (before + pending[:cut])[-CONTEXT:], pending[cut:]
    if pending:
        yield _encode_after(tokenizer, before, pending)


def document_stream(
    tokenizer: Tokenizer, content: Iterable[bytes], where: str, *, state: GeckoState | None = None
) -> Iterator[Tensor]:
    """Yield the ids of a text as models and ``gecko read`` read it: the document start, then ``encode_stream``.

    After ``state``, which is inside a document, no document starts.
    """
    if state is None:
        yield torch.tensor([tokenizer.document_start], device="cpu")
    yield from encode_stream(tokenizer, content, where)


def document_ids(tokenizer: Tokenizer, text: str, *, state: GeckoState | None = None) -> Tensor:
    """Return the ids of ``document_stream`` for a short text, (length,) int64."""
    ids = document_stream(tokenizer, [text.encode()], "the text", state=state)
    return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *ids])


def _decode(content: Iterable[bytes], where: str) -> Iterator[str]:
    """Yield the text without a byte-order mark."""

    def refused(found: str, offset: int) -> ValueError:
        return ValueError(
            f"{where} must be UTF-8 text for this tokenizer; got {found} at byte offset {offset}. "
            "Convert it to UTF-8; only models of bytes read any file."
        )

    decoder = codecs.getincrementaldecoder("utf-8")()
    taken, begun = 0, False
    for piece in chain(content, [None]):  # None is the end
        unfinished = len(decoder.getstate()[0])
        if piece is not None and (zero := piece.find(0)) >= 0:
            raise refused("a NUL byte", taken + zero)
        try:
            text = decoder.decode(piece or b"", final=piece is None)
        except UnicodeDecodeError as error:
            found = f"the invalid byte 0x{error.object[error.start]:02x}"
            raise refused(found, taken - unfinished + error.start) from error
        yield text if begun else text.removeprefix(BYTE_ORDER_MARK)
        taken, begun = taken + len(piece or b""), begun or bool(text)


def _find_border(tokenizer: Tokenizer, before: str, text: str, block: int) -> int:
    """Return the last position up to ``block`` where tokens end, preferably at the end of a word."""
    places = range(block, max(0, block - 4 * CONTEXT), -1)
    words = [place for place in places if text[place].isspace() and not text[place - 1].isspace()]
    for place in (*words, *places):
        left, right = (before + text[:place])[-CONTEXT:], text[place : place + CONTEXT]
        if _common_start(tokenizer.encode(left), tokenizer.encode(left + right)):
            return place
    return block


def _encode_after(tokenizer: Tokenizer, before: str, text: str) -> Tensor:
    """Encode ``text`` as it follows ``before``, because SentencePiece adds a space before a text's first word."""
    if not before:
        return torch.from_numpy(tokenizer.encode(text))
    known, all_ids = tokenizer.encode(before), tokenizer.encode(before + text)
    return torch.from_numpy(all_ids[len(known) :] if _common_start(known, all_ids) else tokenizer.encode(text))


def _common_start(start: np.ndarray, ids: np.ndarray) -> bool:
    return len(start) <= len(ids) and bool((ids[: len(start)] == start).all())


def letter(tokenizer: Tokenizer) -> list[int]:
    """Return the id of a letter as context for other ids; an empty list if the tokenizer encodes no letter."""
    return tokenizer.encode("a").tolist()[-1:]


class StreamDecoder:
    """Decodes ids to text piece by piece; the pieces join to ``tokenizer.decode`` of all ids.

    Text is held back while it ends in an incomplete UTF-8 character. The cost per id does not depend on the length of
    the stream. ``goes_on``: the ids follow other text, so the first word keeps the space of SentencePiece.
    """

    def __init__(self, tokenizer: Tokenizer, *, goes_on: bool = False) -> None:
        self._tokenizer = tokenizer
        self._context = letter(tokenizer) if goes_on else []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that ``ids`` complete, possibly none."""
        pieces = []
        for index in text_ids(self._tokenizer, ids):
            self._pending.append(index)
            pieces.append(self._release(final=False))
        return "".join(pieces)

    def flush(self) -> str:
        """Return the text held back, at the end of the stream; U+FFFD for an incomplete character."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        # The text of a token depends on earlier ones: SentencePiece drops the space before a text's first word only.
        # So decode together with the piece returned last, and cut that off.
        before = self._tokenizer.decode(self._context)
        whole: str = self._tokenizer.decode(self._context + self._pending)
        if len(whole) > len(before) and (final or not whole.endswith(REPLACEMENT)):
            self._context, self._pending = self._pending, []
            return whole[len(before) :]
        # Bytes that are no text are passed on too, where no later id can change them. An incomplete character is in the
        # last LONGEST_CHARACTER - 1 ids; among the LONGEST_CHARACTER places before them, one is the end of a character,
        # unless every id there straddles characters.
        kept = len(self._pending) - LONGEST_CHARACTER
        for end in range(kept, kept - LONGEST_CHARACTER, -1) if kept >= LONGEST_CHARACTER else ():
            text = self._tokenizer.decode(self._context + self._pending[:end])
            if len(text) > len(before) and whole.startswith(text):
                self._context, self._pending = self._pending[:end], self._pending[end:]
                return text[len(before) :]
        return ""


class TokenBytes:
    """Bytes in UTF-8 that every id of a tokenizer adds to the decoded text; special ids and those beyond add none.

    An id that is part of a character counts the bytes of its part.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        word = next((index for index in ids if tokenizer.decode([index]).isalnum()), tokenizer.document_end)
        alone, twice = (len(tokenizer.decode([word] * count).encode()) for count in (1, 2))

        def added(before: list[int], index: int, without: int) -> int:
            text, piece = tokenizer.decode([*before, index, word]), tokenizer.piece(index)
            if REPLACEMENT in text and REPLACEMENT not in piece:
                return 1 if _BYTE.fullmatch(piece) else len(piece)  # byte-level pieces have a letter for each byte
            return len(text.encode()) - without

        self._inside = np.array([added([word], index, twice) for index in ids])
        # Many tokenizers write no space before the first word of a text.
        self._first = np.array([added([], index, twice - alone) for index in ids])
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
        tokens, targets, known = batch.tokens.numpy(), batch.targets.numpy(), len(self._special)
        # Special tokens of a chat template may be beyond the ids of the tokenizer itself.
        begins, none = self._special[tokens % known] | (tokens >= known), (targets == IGNORED) | (targets >= known)
        begins[:, 1:] |= targets[:, :-1] == IGNORED  # the first token of an answer
        ids = np.where(none, 0, targets)
        counts = np.where(begins, self._first[ids], self._inside[ids])
        return torch.from_numpy(np.where(none, 0, counts).sum(1))


@lru_cache(maxsize=4)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the bytes of a tokenizer's ids; a large vocabulary takes seconds."""
    return TokenBytes(tokenizer)


def check_loss(tokenizer: Tokenizer, texts: Iterable[str], *, allowed: bool) -> str:
    """Return the share of characters that a tokenizer loses or adds, in words; an empty text if it does neither.

    Up to ``SAMPLE`` characters are encoded and decoded. The normalisation that the tokenizer declares is no loss. Raise
    ValueError if it changes more than ``LARGEST_LOSS``, which is not ``allowed``.
    """
    sample, total, lost, added = list[str](), 0, Counter[str](), Counter[str]()
    for text in texts if not isinstance(tokenizer, ByteTokenizer) else ():
        sample.append(text[: SAMPLE - total])
        total += len(sample[-1])
        if total == SAMPLE:
            break
    for text, ids in zip(sample, tokenizer.encode_batch(sample), strict=True):
        if (kept := tokenizer.decode(ids)) != text:
            wanted, found = Counter(tokenizer.normalize(text)), Counter(tokenizer.normalize(kept))
            lost += wanted - found
            added += found - wanted
    # An unknown character is often written as a mark of some letters.
    if not (changed := added if added.total() > 20 * lost.total() else lost):
        return ""
    named = ", ".join(repr(character) for character, _ in changed.most_common(3))
    does = "loses" if changed is lost else "adds"
    share = f"{does} {changed.total() / total:.3%} of the characters, most often {named}"
    if changed.total() > LARGEST_LOSS * total and not allowed:
        raise ValueError(
            f"a tokenizer must keep {1 - LARGEST_LOSS:.1%} of the characters; {tokenizer.name!r} {share} (in a "
            f"sample of {total:,}). Take one that falls back to bytes, or set data.allow_loss=true (gecko tokenize: "
            "--allow-loss)."
        )
    return f"the tokenizer {tokenizer.name!r} {share} (in a sample of {total:,})"
