"""Stamps: records that a file had the right SHA-256, so that it is read again only after it changed.

A stamp holds the size of the file and the times of its last change of content and of metadata. No program can set the
latter back, so a stamp does not fit a file that was replaced or written to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gecko.io.files import parse_json, whole_file

FOLDER = ".verified"
"""Folder of the stamps, beside the files."""
SETTLED_SECONDS = 2.0
"""A file that changed more recently gets no stamp: it may change again before the clock of the file system ticks."""


def has_digest(path: Path, digest: str, *, stamped: bool, and_holds: Callable[[], bool] = lambda: True) -> bool:
    """Return whether the file's SHA-256 is ``digest`` and its content passes the check ``and_holds``.

    With ``stamped``, do not read the file if a stamp says so.

    A file that was read gets a stamp, if its folder can be written.
    """
    stamp, wanted = path.parent / FOLDER / f"{path.name}.json", _identity(path, digest)
    if stamped and _read(stamp) == wanted:
        return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest or not and_holds():
            return False
    if time.time() - wanted["modified"] / 1e9 > SETTLED_SECONDS:
        with contextlib.suppress(OSError):
            stamp.parent.mkdir(exist_ok=True)
            with whole_file(stamp) as temporary:
                temporary.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    return True


def _identity(path: Path, digest: str) -> dict[str, Any]:
    found = path.stat()
    return {"sha256": digest, "size": found.st_size, "modified": found.st_mtime_ns, "changed": found.st_ctime_ns}


def _read(stamp: Path) -> Any:
    """Return the content of a stamp; None if there is none, or it is damaged."""
    try:
        return parse_json(stamp.read_bytes())
    except (OSError, ValueError):
        return None
