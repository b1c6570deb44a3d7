"""The package's version, and which code of it runs."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def code_version() -> dict[str, str | None]:
    """``version``, and the git ``commit`` where the package is imported from a checkout of its own, else None.

    The commit is the full hash; ``-dirty`` follows it where tracked files differ from it.
    """
    return {"version": __version__, "commit": git_commit(Path(__file__).resolve())}


def code_name(code: Mapping[str, str | None]) -> str:
    """``code_version``'s answer, now or as recorded, in words."""
    commit = code.get("commit")
    place = "not from a checkout" if commit is None else f"commit {commit}"
    return f"{code['version']}, {place}"


def git_commit(file: Path) -> str | None:
    """The commit of the checkout that tracks ``file``; None where git is missing or does not track it.

    An installed copy inside another project's checkout is not of that project's commit.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
