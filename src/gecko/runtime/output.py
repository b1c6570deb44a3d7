"""Output of work that must not end because its reader did, as in ``gecko train … | head``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


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
def lasting_output() -> Iterator[None]:
    """Context in which nothing that is printed raises an error, also if a pipe was closed or a disk is full."""
    before: tuple[Any, Any] = sys.stdout, sys.stderr  # None: closed when Python started, so nothing is printed
    errors = sys.stderr and _Lasting(sys.stderr, None)
    output = sys.stdout and _Lasting(sys.stdout, errors)
    sys.stdout, sys.stderr = output, errors
    try:
        yield
    finally:
        if output:
            output.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def lasting_messages() -> Iterator[None]:
    """Context in which no message to standard error raises an error; they are lost if it cannot be written to."""
    before: Any = sys.stderr
    sys.stderr = before and _Lasting(before, None)
    try:
        yield
    finally:
        sys.stderr = before
