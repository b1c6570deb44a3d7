"""One process holds a lock, and the lock ends with the process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from gecko.io.files import locked

_HOLDER = """
import sys, time
from pathlib import Path
from gecko.io.files import locked
with locked(Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    time.sleep(1000)
"""


def free(lock: Path) -> bool:
    try:
        with locked(lock, wait=False):
            return True
    except ValueError as error:
        assert f"one process at a time may work in {lock.parent}; another one" in str(error)
        return False


def test_it_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".lock"
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        refused = not free(lock)
        holder.send_signal(signal.SIGKILL)
        with locked(lock, wait=True):
            assert refused and not free(lock)
    assert free(lock)


def test_it_ends_with_an_error(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with pytest.raises(KeyError), locked(lock, wait=False):
        raise KeyError
    with locked(lock, wait=False):
        assert free(tmp_path / ".other")


def test_a_file_system_without_locks_is_worked_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with (
        pytest.warns(UserWarning, match=r"\.lock cannot be locked \(No locks available\)"),
        locked(tmp_path / ".lock", wait=False),
    ):
        pass
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path / ".lock", wait=False):
        pass
