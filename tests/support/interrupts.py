"""Interrupts for processes that tests start."""

from __future__ import annotations

import signal


def take_interrupts() -> None:
    """In a process about to be: a shell starts its background jobs with interrupts ignored, tests among them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
