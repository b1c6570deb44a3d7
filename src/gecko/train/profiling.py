"""A trace of some steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


class ProfileWindow:
    """Records the steps from ``window[0]`` to ``window[1]``, counted from 1, and writes them as a Chrome trace.

    A session that ends or begins within the window writes its part, named after the steps that it has.
    """

    def __init__(self, window: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self._window, self._folder, self._rank = window, folder, rank
        self._profiler: Any = None
        self._first = self._last = 0

    def step(self, number: int) -> AbstractContextManager[Any]:
        """A context for the step of that number; to be called for every step."""
        if self._window is None or not self._window[0] <= number <= self._window[1]:
            self.finish()
            return nullcontext()
        if self._profiler is None:
            self._first = number
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()
        self._last = number
        return torch.profiler.record_function(f"step {number}")

    def finish(self) -> None:
        """Write what was recorded."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._first}-{self._last}-rank-{self._rank:05d}.json"
        self._profiler.export_chrome_trace(str(self._folder / name))
        self._profiler = None
