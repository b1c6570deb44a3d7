"""Which files a source names, in an order that never changes."""

from __future__ import annotations

import difflib
import glob
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

STDLIB = "stdlib"
"""The source that stands for the Python standard library's own source files."""

NOT_STDLIB = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"})
"""Folders beside or inside the standard library that are not read with it."""


def find_files(source: str) -> list[Path]:
    """Files of a path, a folder (all files in it, hidden ones left out) or a glob, sorted by path.

    Raises:
        FileNotFoundError: there is nothing at the path, in the folder or for the glob.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder_files(path)
    if path.exists():
        return [path]
    if glob.has_magic(source):
        return _glob_files(source)
    near = difflib.get_close_matches(path.name, _names_beside(path), n=1)
    hint = f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""
    raise FileNotFoundError(
        f"a source of documents must be a file, a folder, a glob, 'hf:NAME' or {STDLIB!r}; "
        f"got {source!r}, which does not exist.{hint}"
    )


def stdlib_files() -> list[Path]:
    """The Python standard library's ``.py`` files on this machine, sorted by path, without its tests.

    Raises:
        FileNotFoundError: this Python keeps its library elsewhere than in ``.py`` files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # The build configuration differs from machine to machine and is not part of the library's source.
    files = [
        path
        for path in _sorted_below(root, skip=NOT_STDLIB.__contains__)
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise FileNotFoundError(
            f"the source {STDLIB!r} needs the standard library's .py files; got none in {root}. "
            f"Name files of your own, or use a full installation of Python."
        )
    return files


def _folder_files(folder: Path) -> list[Path]:
    files = _sorted_below(folder, skip=lambda name: name.startswith("."))
    if not files:
        raise FileNotFoundError(f"a folder of documents must hold at least one file; got {str(folder)!r} with none.")
    return files


def _glob_files(pattern: str) -> list[Path]:
    matches = glob.glob(str(Path(pattern).expanduser()), recursive=True)
    files = sorted((path for path in map(Path, matches) if path.is_file()), key=Path.as_posix)
    if not files:
        raise FileNotFoundError(
            f"a glob must match at least one file; got {pattern!r}, which matches none. "
            f"'**' stands for any depth of folders, as in 'folder/**/*.txt'."
        )
    return files


def _sorted_below(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Files at any depth whose name, and the names of their folders below ``root``, are not skipped."""
    files = []
    for folder, folder_names, file_names in os.walk(root):
        # Pruned in place, so that a large folder such as site-packages or .git is not walked at all.
        folder_names[:] = [name for name in folder_names if not skip(name)]
        files += [Path(folder, name) for name in file_names if not skip(name)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _names_beside(path: Path) -> list[str]:
    return [STDLIB, *(entry.name for entry in path.parent.iterdir())] if path.parent.is_dir() else []
