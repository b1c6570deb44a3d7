"""Files that commands write at their end."""

from __future__ import annotations

import os
from pathlib import Path

from gecko.files import check_replaceable


def output_file(out: str, option: str = "--out") -> Path:
    """The file of an option, its folder made if it is not there: looked at before hours of work, not after them.

    Raises:
        ValueError: nothing can be written there, or there is a folder, a device or a pipe.
    """
    path = Path(out).expanduser()
    try:
        check_replaceable(path)
        # Of a link, where it points at: there it will be written.
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise _unfit(out, option) from error
    if not writable:
        raise _unfit(out, option)
    return path


def _unfit(out: str, option: str) -> ValueError:
    return ValueError(
        f"{option} must be a file in a folder that can be written to, and no device or pipe; got {out}. "
        "Name another path."
    )
