"""A rank that hangs says where."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path
from types import TracebackType

GRACE_SECONDS = 5.0
"""Between writing the stacks and the end: when the first rank goes, the others fail at once, and not in their wait."""


class Watchdog:
    """Context: without a ``beat`` for ``minutes``, the stacks of all threads go to ``folder/rank-N.txt``, and soon
    after the process ends by SIGALRM. Ranks that wait for one that hangs come to the same end, so every rank's stack
    is there.

    The first timer is a thread of C code, the second the kernel's: neither needs the interpreter that hangs.
    """

    def __init__(self, folder: Path, rank: int, minutes: float) -> None:
        self.path = folder / f"rank-{rank:05d}.txt"
        self._seconds = minutes * 60
        folder.mkdir(parents=True, exist_ok=True)

    def beat(self) -> None:
        """There is progress: the time starts again."""
        faulthandler.dump_traceback_later(self._seconds, file=self._file)
        signal.setitimer(signal.ITIMER_REAL, self._seconds + GRACE_SECONDS)

    def __enter__(self) -> Watchdog:
        self._file = self.path.open("a", encoding="utf-8")
        self.beat()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        self._file.close()


def reported_hangs(folder: Path) -> list[Path]:
    """The files in which ranks of an earlier session wrote their stacks."""
    return sorted(path for path in folder.glob("rank-*.txt") if path.stat().st_size)
