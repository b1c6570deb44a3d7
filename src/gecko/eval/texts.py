"""Texts for evaluations, read from files in pieces as often as needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gecko.data import ByteTokenizer, Tokenizer
from gecko.data.readers import check_plain_text, decode_text, read_pieces
from gecko.inference import encode_stream

_CONTEXT_IDS = 8
"""Ids of context with which a piece is decoded: SentencePiece drops the space before a text's first word."""


@dataclass(frozen=True)
class Text:
    """A text: the content of one file, or of several files in order."""

    name: str
    paths: tuple[Path, ...]

    def tokens(self, tokenizer: Tokenizer) -> Iterator[Tensor]:
        """Yield the ids as 1-D int64 tensors, without document tokens; errors as for ``encode_stream``."""
        return encode_stream(tokenizer, self._pieces(), self.name)

    def whole(self) -> str:
        """Return the whole text as a string; errors as for ``decode_text``."""
        return decode_text(b"".join(self._pieces()), self.name)

    def _pieces(self) -> Iterator[bytes]:
        return (piece for path in self.paths for piece in read_pieces(path))


def open_texts(sources: Sequence[str], *, joined: bool) -> list[Text]:
    """Return one text per file, or with ``joined`` one text of all files.

    Raises:
        FileNotFoundError: a source is not a file. Standard input is not supported, since texts are read repeatedly.
        ValueError: a suffix names a format of records or another format that is not plain text.
    """
    paths = [Path(source).expanduser() for source in sources]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"a text must be a file, since it is read more than once; there is no file {path}.")
        check_plain_text(path)
    if joined:
        return [Text(" + ".join(path.name for path in paths), tuple(paths))]
    return [Text(str(path), (path,)) for path in paths]


class Cursor:
    """Reader of a stream of 1-D tensors that takes a given number of elements at a time."""

    def __init__(self, parts: Iterator[Tensor]) -> None:
        self._parts = parts
        self._held = torch.empty(0, dtype=torch.int64)

    def take(self, count: int) -> Iterator[Tensor]:
        """Yield the next ``count`` elements, or those that are left. Iterate to the end before the next call."""
        while count:
            if not len(self._held):
                held = next(self._parts, None)
                if held is None:
                    return
                self._held = held
            part, self._held = self._held[:count], self._held[count:]
            count -= len(part)
            yield part


@dataclass
class TextSize:
    """Size of a text in tokens, bytes and words."""

    tokens: int = 0
    bytes: int = 0
    words: int = 0
    """Words separated by white space, as PG-19 counts them."""


def measure(tokenizer: Tokenizer, parts: Iterator[Tensor]) -> TextSize:
    """Return the size of a text that is given in pieces."""
    size, inside, context = TextSize(), False, torch.empty(0, dtype=torch.int64)
    for part in parts:
        content = _content(tokenizer, context, part)
        context = torch.cat([context, part])[-_CONTEXT_IDS:]
        if not content:
            continue
        words = len(content.split())
        size.words += words - (1 if inside and not content[:1].isspace() else 0)
        inside = not content[-1:].isspace()
        size.bytes += len(content)
        size.tokens += len(part)
    return size


def _content(tokenizer: Tokenizer, context: Tensor, part: Tensor) -> bytes:
    if isinstance(tokenizer, ByteTokenizer):
        return bytes(part.tolist())
    before = tokenizer.decode(context.tolist())
    return tokenizer.decode([*context.tolist(), *part.tolist()])[len(before) :].encode()
