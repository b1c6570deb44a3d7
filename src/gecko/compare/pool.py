"""Runs as processes, a few at a time."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from types import TracebackType
from typing import Literal

from gecko.compare.folder import LOG, claim, evaluation_of
from gecko.compare.plan import Planned
from gecko.compare.worker import DIVERGED

State = Literal["waiting", "training", "finished", "diverged", "failed", "stopped"]
_TAIL_LINES = 12


class Pool:
    """Context in which ``planned`` runs are trained, ``jobs`` at a time, in their order; on leaving it none is left.

    Finished ones are skipped, begun ones go on. A run that fails does not stop the others.

    Raises:
        ValueError: a run's folder holds something else.
    """

    def __init__(self, planned: Sequence[Planned], jobs: int) -> None:
        self.planned, self.jobs = list(planned), jobs
        self._files = {one.label: claim(one) for one in planned}
        self.states: dict[str, State] = {one.label: "finished" if self._finished(one) else "waiting" for one in planned}
        """By label."""
        self.failures: dict[str, str] = {}
        """Why, of those that failed or diverged: the end of their log."""
        self._waiting = deque(one for one in planned if self.states[one.label] == "waiting")
        self._running: dict[str, tuple[Planned, Popen[bytes]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def advance(self) -> list[Planned]:
        """Start what there is room for; those that have ended since the last call."""
        ended = [one for one, process in self._running.values() if process.poll() is not None]
        for one in ended:
            self._record(one, self._running.pop(one.label)[1])
        while self._waiting and len(self._running) < self.jobs:
            one = self._waiting.popleft()
            self._running[one.label] = one, self._start(one)
            self.states[one.label] = "training"
        return ended

    def stop(self) -> None:
        """Have the running ones save and end, and wait for that; those that wait are left."""
        self._waiting.clear()
        for _, process in self._running.values():
            process.terminate()
        for one, process in self._running.values():
            process.wait()
            self.states[one.label] = "finished" if self._finished(one) else "stopped"
        self._running.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _, process in self._running.values():
            process.kill()
            process.wait()

    def _start(self, one: Planned) -> Popen[bytes]:
        environment = dict(os.environ)
        if one.run.threads is None and self.jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.jobs)))
        with (one.run.folder / LOG).open("ab") as log:
            # A session of its own: Ctrl-C goes to this process, which asks the others to save.
            return Popen(
                [sys.executable, "-m", "gecko.compare.worker", str(self._files[one.label])],
                stdin=PIPE, stdout=log, stderr=STDOUT, start_new_session=True, env=environment,
            )  # fmt: skip

    def _record(self, one: Planned, process: Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        if self._finished(one):
            self.states[one.label] = "finished"
            return
        self.states[one.label] = "diverged" if process.returncode == DIVERGED else "failed"
        how = f"exit code {process.returncode}" if process.returncode else "stopped by someone else"
        self.failures[one.label] = f"{how}; the end of {one.run.folder / LOG}:\n{_tail(one.run.folder / LOG)}"

    @staticmethod
    def _finished(one: Planned) -> bool:
        return evaluation_of(one.run) is not None


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines)
