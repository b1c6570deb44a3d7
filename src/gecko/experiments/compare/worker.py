"""One run in a process of its own: ``python -m gecko.compare.worker FOLDER/planned.json``.

It does what ``gecko train FOLDER/planned.json --resume`` does, and stops, saving, when the process that holds the
other end of its standard input is no more.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from gecko.compare.folder import LOCK
from gecko.lock import locked
from gecko.train import NonFiniteError, Run, train

DIVERGED = 3
"""Exit code of a run that gave up after too many skipped steps."""


def main(path: Path) -> int:
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    # A worker whose parent was killed may still be saving.
    with locked(path.parent / LOCK, wait=True):
        try:
            train(Run.load(path), resume=True)
        except NonFiniteError as error:
            print(error, file=sys.stderr)
            return DIVERGED
    return 0


def _stop_with_parent() -> None:
    # Not through sys.stdin, whose lock this thread would still hold when Python ends.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
