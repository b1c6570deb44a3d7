"""One process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems answer that have no locks, as some of clusters are mounted."""


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds the lock that is the file ``path``, made with its folder where it is not there; it ends with the process.

    Where the file system has no locks, a warning says so and nothing is held.

    Raises:
        ValueError: another holds it, and not ``wait``.
        OSError: the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        _lock(file, path, wait)
        yield


def _lock(file: TextIOWrapper, path: Path, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise ValueError(
            f"one process at a time may work in {path.parent}; another one is at work there and holds {path.name}. "
            "Wait for it, or choose another --out."
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(f"{path} cannot be locked ({error.strerror}): see that nothing else works there", stacklevel=2)
