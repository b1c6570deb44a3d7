"""Process that trains one run: ``python -m gecko.experiments.compare.worker FOLDER/planned.json``.

It does the same as ``gecko train FOLDER/planned.json --resume``. When its parent ends, which closes the pipe of its
standard input, it saves a checkpoint and stops.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from gecko.experiments.compare.plan import LOCK
from gecko.io.files import locked
from gecko.runtime.terminal import visible
from gecko.train import NonFiniteError, Run, train

FAILED, DIVERGED = 1, 3
"""Exit codes: settings or data that cannot be trained on, and a run that stopped after too many skipped steps."""


def main(path: Path) -> int:
    """Train the run described by the file ``path``; return the exit code."""
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    # A worker whose parent was killed may still be saving.
    with locked(path.parent / LOCK, wait=True):
        try:
            train(Run.load(path), resume=True)
        except NonFiniteError as error:
            print(visible(str(error)), file=sys.stderr)
            return DIVERGED
        except (
            ValueError,
            FileExistsError,
            FileNotFoundError,
        ) as error:  # written for users; the end of the log is shown to them
            print(visible(f"error: {error}"), file=sys.stderr)
            return FAILED
    return 0


def _stop_with_parent() -> None:
    # With sys.stdin this thread would still hold its lock when Python exits.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
