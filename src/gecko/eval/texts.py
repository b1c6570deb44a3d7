"""Texts that are scored: read from files as often as they are needed, never held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gecko.data import ByteTokenizer, Tokenizer
from gecko.data.compression import read_pieces
from gecko.data.readers import decode_text
from gecko.generation import encode_stream

_CONTEXT_IDS = 8
"""Ids before a piece that decide how it is written: SentencePiece drops the space before a text's first word."""


@dataclass(frozen=True)
class Text:
    """The content of one file, or of several in order, as one text."""

    name: str
    paths: tuple[Path, ...]

    def tokens(self, tokenizer: Tokenizer) -> Iterator[Tensor]:
        """Ids as 1-D int64 tensors, without document borders; errors as for ``encode_stream``."""
        return encode_stream(tokenizer, self._pieces(), self.name)

    def whole(self) -> str:
        """All of it, for evaluations that need a text as a whole; errors as for ``decode_text``."""
        return decode_text(b"".join(self._pieces()), self.name)

    def _pieces(self) -> Iterator[bytes]:
        return (piece for path in self.paths for piece in read_pieces(path))


def open_texts(sources: Sequence[str], *, joined: bool) -> list[Text]:
    """A text for each file, or with ``joined`` one of all.

    Raises:
        FileNotFoundError: a source is no file; standard input cannot be read more than once.
    """
    paths = [Path(source).expanduser() for source in sources]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"a text must be a file, since it is read more than once; there is no file {path}.")
    if joined:
        return [Text(" + ".join(path.name for path in paths), tuple(paths))]
    return [Text(str(path), (path,)) for path in paths]


class Cursor:
    """Takes runs of a stream of 1-D tensors, in order."""

    def __init__(self, parts: Iterator[Tensor]) -> None:
        self._parts = parts
        self._held = torch.empty(0, dtype=torch.int64)

    def take(self, count: int) -> Iterator[Tensor]:
        """The next ``count`` elements, or as many as are left; iterate to the end before taking more."""
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
    """How much text some tokens are."""

    tokens: int = 0
    bytes: int = 0
    words: int = 0
    """Runs of characters between white space, as PG-19 counts them."""


def measure(tokenizer: Tokenizer, parts: Iterator[Tensor]) -> TextSize:
    """The size of a text that comes in pieces."""
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
