"""Files that commands write at their end."""

from __future__ import annotations

import os
from pathlib import Path


def output_file(out: str) -> Path:
    """The file of ``--out``, its folder made if it is not there: looked at before hours of work, not after them.

    Raises:
        ValueError: nothing can be written there.
    """
    path = Path(out).expanduser()
    problem = ValueError(f"--out must be a file in a folder that can be written to; got {out}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise problem from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise problem
    return path
