"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 30.0


def until(holds: Callable[[], bool]) -> None:
    """Returns as soon as ``holds()``; fails after ``PATIENCE`` seconds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)
