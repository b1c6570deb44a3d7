"""Text of any length to token ids, without holding all of it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from gecko.data import ByteTokenizer, Tokenizer

BLOCK = 1 << 16
"""Characters that are encoded at once."""
CONTEXT = 256
"""Characters on both sides that decide whether a place is a border between tokens."""
_BYTE_ORDER_MARK = "\ufeff"


def encode_stream(
    tokenizer: Tokenizer, content: Iterable[bytes], where: str, *, block: int = BLOCK
) -> Iterator[Tensor]:
    """Ids of a text that comes in pieces of bytes, as 1-D int64 tensors; joined, those of the whole text.

    The bytes tokenizer takes any bytes; the others take UTF-8.

    Args:
        where: names the text in errors.
        block: characters encoded at once.

    Raises:
        ValueError: what is no UTF-8 text, with the offset of the byte.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return (torch.from_numpy(np.frombuffer(piece, dtype=np.uint8).astype(np.int64)) for piece in content)
    return _encode_text(tokenizer, _decode(content, where), block)


def _decode(content: Iterable[bytes], where: str) -> Iterator[str]:
    """The text, without a byte-order mark at its start."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    taken, begun = 0, False
    for piece in content:
        text = _decode_piece(decoder, piece, taken, where)
        yield text if begun else text.removeprefix(_BYTE_ORDER_MARK)
        taken, begun = taken + len(piece), begun or bool(text)
    _decode_piece(decoder, b"", taken, where, final=True)


def _decode_piece(
    decoder: codecs.IncrementalDecoder, piece: bytes, taken: int, where: str, *, final: bool = False
) -> str:
    """The characters that ``piece``, which begins after ``taken`` bytes, completes."""
    held = len(decoder.getstate()[0])
    zero = piece.find(0)
    if zero >= 0:
        raise _binary(where, "a NUL byte", taken + zero)
    try:
        return decoder.decode(piece, final)
    except UnicodeDecodeError as error:
        found = f"the invalid byte 0x{error.object[error.start]:02x}"
        raise _binary(where, found, taken - held + error.start) from error


def _binary(where: str, found: str, offset: int) -> ValueError:
    return ValueError(
        f"{where} must be UTF-8 text for this tokenizer; got {found} at byte offset {offset}. "
        "Convert it to UTF-8; only models of bytes read anything."
    )


def _encode_text(tokenizer: Tokenizer, texts: Iterable[str], block: int) -> Iterator[Tensor]:
    before, pending = "", ""
    for text in texts:
        pending += text
        while len(pending) >= block + CONTEXT:
            cut = _find_border(tokenizer, before, pending, block)
            yield _encode_after(tokenizer, before, pending[:cut])
            before, pending = (before + pending[:cut])[-CONTEXT:], pending[cut:]
    if pending:
        yield _encode_after(tokenizer, before, pending)


def _find_border(tokenizer: Tokenizer, before: str, text: str, block: int) -> int:
    """The last place up to ``block`` where tokens end, the end of a word if there is one."""
    places = range(block, max(0, block - 4 * CONTEXT), -1)
    words = [place for place in places if text[place].isspace() and not text[place - 1].isspace()]
    for place in (*words, *places):
        left, right = (before + text[:place])[-CONTEXT:], text[place : place + CONTEXT]
        if _common_start(tokenizer.encode(left), tokenizer.encode(left + right)):
            return place
    return block


def _encode_after(tokenizer: Tokenizer, before: str, text: str) -> Tensor:
    """Ids of ``text`` as it is written after ``before``: SentencePiece puts a space before a text's first word."""
    if not before:
        return torch.from_numpy(tokenizer.encode(text))
    known, all_ids = tokenizer.encode(before), tokenizer.encode(before + text)
    return torch.from_numpy(all_ids[len(known) :] if _common_start(known, all_ids) else tokenizer.encode(text))


def _common_start(start: np.ndarray, ids: np.ndarray) -> bool:
    return len(start) <= len(ids) and bool((ids[: len(start)] == start).all())
