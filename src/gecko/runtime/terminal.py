"""Output of commands: no text of a user, a file or a model controls the terminal, or is read as markup.

Work does not end because the reader of its output did, as in ``gecko train … | head``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

_CONTROLS = (
    *range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000),
)  # fmt: skip
"""Control characters but tab and newline, characters that turn the direction of text, and bytes that are no UTF-8."""
_SHOWN = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}


def visible(text: str) -> str:
    """Return a text with every character that controls a terminal replaced by its escape, such as ``\\x1b``."""
    return text.translate(_SHOWN)


class Terminal(Console):
    """Console that prints texts as they are: without markup and names of emoji unless asked for, and ``visible``."""

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, markup=markup, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def status(self, status: RenderableType, **options: Any) -> Status:
        return super().status(Text(visible(status)) if isinstance(status, str) else status, **options)


class _Lasting:
    """Text stream that writes to the null device once its file cannot be written to."""

    def __init__(self, stream: Any, notice: Any) -> None:
        self._stream, self._notice = stream, notice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._guarded(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            with suppress(OSError, ValueError):  # what is left in the buffer must not fail when Python exits
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            notice, self._notice = self._notice, None
            if notice is not None:
                print(f"standard output cannot be written to any more ({error}); the work goes on", file=notice)


@contextmanager
def lasting_messages() -> Iterator[None]:
    """Context in which no message to standard error raises an error; they are lost if it cannot be written to."""
    before: Any = sys.stderr  # None: closed when Python started, so nothing is printed
    sys.stderr = before and _Lasting(before, None)
    try:
        yield
    finally:
        sys.stderr = before


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which nothing that is printed raises an error, also if a pipe was closed or a disk is full."""
    before: Any = sys.stdout
    with lasting_messages():
        output = sys.stdout = before and _Lasting(before, sys.stderr)
        try:
            yield
        finally:
            if output:
                output.flush()
            sys.stdout = before
