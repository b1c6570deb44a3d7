"""Parts of a measurement in processes of their own: what crashes or hangs loses no more than the task at hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from gpu.record import Record

STALLED_AFTER = 180.0
"""Seconds without a result after which a process is ended: kernels are compiled in fewer."""
LEAST = 20.0
"""Seconds under which no process is started: it would not come to a result."""
OUT_OF_TIME = "no time was left"


@dataclass(frozen=True)
class Runner:
    """Measures parts one after the other, each by ``command(part)``, which writes into ``record``."""

    record: Record
    command: Callable[[str], Sequence[str]]
    order: Sequence[str]
    """All parts that there are."""
    page: Callable[[], None]
    """Writes the page, after every result."""
    deadline: float
    """By ``time.monotonic``."""
    stalled_after: float = STALLED_AFTER
    least: float = LEAST

    def run(self, part: str) -> None:
        """Start a part again after the task that ended it, as long as there are others."""
        self.record.begin(part, self.order)
        while self._left() > self.least:
            begun = len(self.record.tasks(part))
            ending = self._process(part)
            self.record.end(part, ending)
            if not ending or len(self.record.tasks(part)) == begun:
                break
        else:
            self.record.end(part, OUT_OF_TIME)
        self.page()

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _process(self, part: str) -> str:
        """Why the part's process did not end well; "" if it did."""
        with tempfile.TemporaryFile() as errors:
            # A group of its own, so that compilers that it started end with it.
            process = subprocess.Popen(self.command(part), stderr=errors, process_group=0)
            try:
                ending = self._wait(process)
            finally:
                _kill(process)
            text = _text(errors)
        sys.stderr.write(text)
        if ending or not process.returncode:
            return ending
        lines = [line for line in text.splitlines() if line.strip()]
        return f"{_code(process.returncode)}: {lines[-1].strip()[:200] if lines else 'no message'}"

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Until the process ended; why it was not waited for longer, or ""."""
        changed, last = self._version(), time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            if self._version() != changed:
                changed, last = self._version(), time.monotonic()
                self.page()
            if self._left() <= 0:
                return "stopped, for " + OUT_OF_TIME
            if time.monotonic() - last > self.stalled_after:
                return f"stopped after {self.stalled_after:.0f} seconds without a result"
        return ""

    def _version(self) -> int:
        return self.record.path.stat().st_mtime_ns


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group; Python's stacks go to the errors before, where a part asks for them by faulthandler."""
    if process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
    with suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end", file=sys.stderr)  # the driver holds it


def _text(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read().decode(errors="replace")


def _code(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
