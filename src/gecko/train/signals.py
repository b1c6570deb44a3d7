"""Ctrl-C and SIGTERM as a wish to stop, to be read between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopSignal:
    """Context in which SIGINT and SIGTERM set ``requested``. A second Ctrl-C stops at once, as it always did."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        # Python lets only the main thread set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
