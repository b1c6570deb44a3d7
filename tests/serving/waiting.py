"""Waiting for conditions that another thread or process makes true."""

import time
from collections.abc import Callable

PATIENCE = 30.0


def until(holds: Callable[[], bool]) -> None:
    """Return as soon as ``holds()`` is true; fail after ``PATIENCE`` seconds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)
