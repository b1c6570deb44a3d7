"""Texts that commands read, of any length: files, packed or not, and standard input."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from gecko.data import Tokenizer
from gecko.data.compression import COMPRESSED_SUFFIXES, read_pieces
from gecko.generation import encode_stream

STANDARD_INPUT = "-"
BLOCK_BYTES = 4096
"""Read between two looks at the clock and at Ctrl-C."""
_PIPE_BYTES = 1 << 16


@dataclass(frozen=True)
class Text:
    name: str
    """What errors call it."""
    pieces: Iterable[bytes]
    size: int | None
    """In bytes, where it is known."""


def named_text(source: str) -> Text:
    """The content of a file, decompressed as its suffix says, or of standard input.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if source == STANDARD_INPUT:
        return Text("standard input", iter(lambda: sys.stdin.buffer.read(_PIPE_BYTES), b""), None)
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"a text must be a file, or - for standard input; there is no file {path}.")
    packed = path.suffix.lower() in COMPRESSED_SUFFIXES
    return Text(str(path), read_pieces(path), None if packed else path.stat().st_size)


class TextReading:
    """Context in which texts become tokens, one text after the other; on a terminal a bar shows how far.

    Args:
        stopped: asked before every block; once it says true, the tokens end, after a whole character.
    """

    def __init__(
        self, texts: Sequence[Text], tokenizer: Tokenizer, *, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._texts, self._tokenizer, self._stopped = texts, tokenizer, stopped
        self.num_bytes, self.num_tokens = 0, 0
        """Handed out so far."""
        self.unfinished: tuple[int, int] | None = None
        """Where ``stopped`` ended it: in which of the texts, after how many of its bytes."""
        self._bar = Progress(
            SpinnerColumn(), TextColumn("reading {task.description}"), BarColumn(),
            TextColumn("{task.completed:,.0f} bytes, {task.fields[speed]:,.0f} tokens/s"), TimeRemainingColumn(),
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._begin = time.perf_counter()

    def __enter__(self) -> TextReading:
        sizes = [text.size for text in self._texts if text.size is not None]
        total = sum(sizes) if len(sizes) == len(self._texts) else None
        self._task = self._bar.add_task("", total=total, speed=0.0)
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def tokens(self, *, begin: bool) -> Iterator[Tensor]:
        """Ids of all texts as 1-D tensors; ``begin``: after the start of a document, as in training."""
        if begin:
            self.num_tokens += 1
            yield torch.tensor([self._tokenizer.document_start])
        for place, text in enumerate(self._texts):
            self._bar.update(self._task, description=text.name)
            for ids in encode_stream(self._tokenizer, self._blocks(place, text), text.name):
                self.num_tokens += len(ids)
                yield ids
            if self.unfinished is not None:
                return

    def _blocks(self, place: int, text: Text) -> Iterator[bytes]:
        taken = 0
        for block in split_at_characters(text.pieces, BLOCK_BYTES):
            if self._stopped():
                self.unfinished = (place, taken)
                return
            taken, self.num_bytes = taken + len(block), self.num_bytes + len(block)
            yield block
            speed = self.num_tokens / (time.perf_counter() - self._begin)
            self._bar.update(self._task, advance=len(block), speed=speed)


def split_at_characters(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in blocks of about ``size``, none of which ends inside a UTF-8 character."""
    held = b""
    for piece in pieces:
        held, begin = held + piece, 0
        while len(held) - begin > size:
            end = _character_end(held, begin + size)
            yield held[begin:end]
            begin = end
        held = held[begin:]
    if held:
        yield held


def _character_end(data: bytes, near: int) -> int:
    """The last place up to ``near`` that is not before a continuation byte; ``near`` where that is no text."""
    places = range(near, near - 4, -1)
    return next((place for place in places if data[place] & 0b1100_0000 != 0b1000_0000), near)
