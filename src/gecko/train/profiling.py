"""A trace of some steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


class ProfileWindow:
    """Records the steps from ``window[0]`` to ``window[1]``, counted from 1, and writes them as a Chrome trace."""

    def __init__(self, window: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self._window = window
        self._path = folder / f"steps-{window[0]}-{window[1]}-rank-{rank:05d}.json" if window is not None else None
        self._profiler: Any = None

    def step(self, number: int) -> AbstractContextManager[Any]:
        """A context for the step of that number; to be called for every step."""
        if self._window is None or not self._window[0] <= number <= self._window[1]:
            self.finish()
            return nullcontext()
        if self._profiler is None:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()
        return torch.profiler.record_function(f"step {number}")

    def finish(self) -> None:
        """Write what was recorded."""
        if self._profiler is None or self._path is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None
