"""Runs the parts of a measurement in separate processes: a crash or a hang loses only the current task."""

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

from gpu.compilations import BEGUN
from gpu.record import Record

STALLED_AFTER = 90.0
"""Seconds without a result, and without a compilation that begins or ends, after which a process is killed."""
COMPILED_AFTER = 300.0
"""Seconds after the beginning of a compilation, without any other sign, after which a process is killed."""
LEAST = 20.0
"""Seconds that must be left to start a process: with fewer it would not reach a result."""
OUT_OF_TIME = "no time was left"


@dataclass(frozen=True)
class Runner:
    """Runs parts one after the other, each with ``command(part)``, which writes into ``record``."""

    record: Record
    command: Callable[[str], Sequence[str]]
    order: Sequence[str]
    """Names of all parts."""
    page: Callable[[], None]
    """Writes the page; called after every result."""
    deadline: float
    """Time limit, on the clock ``time.monotonic``."""
    stalled_after: float = STALLED_AFTER
    compiled_after: float = COMPILED_AFTER
    least: float = LEAST

    def run(self, part: str) -> None:
        """Run a part; restart it after a task that ended its process, while tasks are left. Such a task is tried
        twice: compiled kernels are kept, so one that was killed while it compiled them gets further."""
        self.record.begin(part, self.order)
        tried: set[str] = set()
        while self._left() > self.least:
            begun = len(self.record.tasks(part))
            ending = self._process(part)
            lost = set(self.record.end(part, ending)) - tried
            if not ending or (len(self.record.tasks(part)) == begun and not lost):
                break
            if self._left() > self.least:
                self.record.forget(part, lost)
                tried |= lost
        else:
            self.record.end(part, OUT_OF_TIME)
        self.record.compilations.clear()
        self.page()

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _process(self, part: str) -> str:
        """Run the part's process; return why it failed, or ""."""
        self.record.compilations.clear()
        with tempfile.TemporaryFile() as errors:
            # A separate process group, so that compilers that it started end with it.
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
        """Wait for the process; return why the wait was given up, or "".

        A result and a compilation that begins or ends are signs of life. If the last sign is the beginning of a
        compilation, the next one may take longer: the process compiles and does not hang.
        """
        results, marks, last = self._version(), self.record.compilations.marks(), time.monotonic()
        limit, doing = self.stalled_after, "without a result"
        while process.poll() is None:
            time.sleep(0.2)
            if self._version() != results:
                results, last = self._version(), time.monotonic()
                limit, doing = self.stalled_after, "without a result"
                self.page()
            if (found := self.record.compilations.marks()) != marks:
                marks, last = found, time.monotonic()
                compiles = marks.endswith(BEGUN)
                limit = self.compiled_after if compiles else self.stalled_after
                doing = "of one compilation" if compiles else "without a result"
            if self._left() <= 0:
                return "stopped, for " + OUT_OF_TIME
            if time.monotonic() - last > limit:
                return f"stopped after {limit:.0f} seconds {doing}"
        return ""

    def _version(self) -> int:
        return self.record.path.stat().st_mtime_ns


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole group, after Python has written its stacks, if the part registered faulthandler."""
    if process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
    with suppress(ProcessLookupError):  # the group has already ended
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end", file=sys.stderr)  # the driver blocks it


def _text(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read().decode(errors="replace")


def _code(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
