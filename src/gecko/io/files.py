"""Atomic files, JSON and JSON Lines files, stamps, and the lock that keeps a folder to one process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; if the block succeeds, flush that file to disk and rename it to ``path``.

    A symbolic link stays, and its target is replaced. An existing file keeps its mode; a new one gets the default mode.
    Raise FileExistsError if ``path`` exists and is not a regular file, OSError if writing failed: the file at ``path``
    is unchanged then.
    """
    check_replaceable(path)
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    known = target.stat().st_mode if target.exists() else None
    # Python can read the umask only by setting it, for all threads; so a new file shows which mode it gives.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if known is None else 0o600))
    mode = stat.S_IMODE(temporary.stat().st_mode if known is None else known)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(target)
    except OSError as error:
        if isinstance(error.__cause__, OSError):  # raised below, for a file written inside this block
            raise
        raise OSError(
            error.errno or errno.EIO,  # libraries raise OSErrors without a number
            f"could not write {path} ({error.strerror or error}); what was there before is unchanged. Free some space, "
            "or choose another folder.",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text as a ``whole_file``."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder of the name of ``path``; if the block succeeds, its files become those of ``path``.

    A new folder appears whole or not at all. Into one that exists the files are moved, ``config.json`` last. What a
    killed process has left of the same folder is removed.
    """
    target = Path(os.path.realpath(path))
    start = f".{target.name}.unfinished-"
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in (entry for entry in target.parent.iterdir() if entry.name.startswith(start)):
        shutil.rmtree(left, ignore_errors=True)
    around = target.parent / f"{start}{secrets.token_hex(4)}"
    partial = around / target.name
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.exists():
            for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
                os.replace(file, target / file.name)
        else:
            partial.rename(target)
    finally:
        shutil.rmtree(around, ignore_errors=True)


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError if ``path`` exists and is not a regular file."""
    if path.exists() and not path.is_file():
        raise FileExistsError(
            f"{path} must be a file, or the name of a new one; it is a folder, a device or a pipe. Choose another path."
        )


T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text of a file; raise ValueError if it is not JSON, nested too deep, or has an object
    with a name twice, of which readers of JSON take one or the other."""
    try:
        return json.loads(text, object_pairs_hook=_object_of)
    except RecursionError as error:
        raise ValueError("lists and objects are nested too deep") from error


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the name {Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is twice in one object")
    return found


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raise OSError if the file cannot be read, ValueError if it is not JSON, or not an object: ``path must hold WHAT``.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} must hold {what} as JSON; {found_at(path)}. Name a file.")
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must hold {what} as JSON; {error}.") from error
    if not isinstance(content, dict):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{path} must hold {what} as a JSON object; got {kind}.")
    return content


def inner_name(name: object) -> str:
    """Return the name of a file that another file of its folder gives; ValueError if it leads out of the folder."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError(f"a file must be named by its path inside the folder; got {name!r}.")
    return name


def found_at(path: str | Path) -> str:
    """Say what lies at a path, for messages that expected something else there."""
    path = Path(path)
    if path.is_dir() or path.is_file():
        return "it is a folder" if path.is_dir() else "it is a file"
    if path.exists():
        return "it is a pipe or a device"
    return "it is a link that leads to no file" if path.is_symlink() else "there is none"


def parse_object(path: str | Path, what: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return ``parse(content)`` for the object of ``read_object``; errors are also those of ``fitting``."""
    content = read_object(path, what)
    return fitting(path, what, lambda: parse(content))


def fitting(path: str | Path, what: str, parse: Callable[[], T]) -> T:
    """Return ``parse()``, which takes apart content of ``path``; ValueError names it if a field does not fit."""
    try:
        return parse()
    except KeyError as error:
        raise ValueError(f"{path} must hold {what}; the field {error} is missing.") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} must hold {what}; {error}") from error


Record = dict[str, Any]
Fields = Mapping[str, tuple[str, Callable[[Any], bool]]]
"""Fields that every record of a file has: what the value is, in words, and whether a value is that."""
_ANY: Fields = {}


def misfit(record: Any, fields: Fields) -> str:
    """Return what a line must be that holds ``record``, and is not; an empty text if the record has ``fields``."""
    if not isinstance(record, dict):
        return f"a JSON object; got a {type(record).__name__}"
    if missing := [name for name in fields if name not in record]:
        return f"a JSON object with {', '.join(fields)}; {', '.join(missing)} is missing"
    wrong = [name for name, (_, fits) in fields.items() if not fits(record[name])]
    return f"a JSON object whose {wrong[0]} is {fields[wrong[0]][0]}; got {record[wrong[0]]!r:.99}" if wrong else ""


def read_lines(path: Path, fields: Fields = _ANY) -> list[Record]:
    """Return the records of a file in order, which have ``fields``, without a torn last line; none if there is no file.
    Raise OSError if the file cannot be read, ValueError if another line is damaged, or the path is a folder."""
    records, damaged = _examine_lines(path, fields)
    if damaged:
        raise ValueError(f"{damaged[0]}. Delete the line, or restore the file from a copy.")
    return records


def _examine_lines(path: Path, fields: Fields) -> tuple[list[Record], list[str]]:
    """Return the records of a file in order, and what is wrong with each damaged line; none if there is no file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a file of JSON Lines; {found_at(path)}. Move it away.")
    records: list[Record] = []
    damaged: list[str] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            reason = misfit(record, fields)
        except ValueError as error:
            reason = f"a JSON object; {error}"
        if not reason:
            records.append(record)
        # After the last line end there is nothing, or a torn line: a process was killed while it wrote.
        elif number < len(lines):
            damaged.append(f"{path}, line {number}, must be {reason}")
    return records, damaged


def as_lines(records: Collection[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def mend_lines(path: Path, fields: Fields = _ANY) -> None:
    """Rewrite a JSON Lines file without lines that are damaged or lack ``fields``, so that lines can be appended.

    A warning names each, and a copy of the original file stays beside it as ``NAME.damaged``. A torn last line, which a
    killed process leaves, is dropped without a warning: its record was never complete.
    """
    records, damaged = _examine_lines(path, fields)
    content = path.read_bytes() if path.exists() else b""
    if damaged:
        before = path.with_name(f"{path.name}.damaged")
        with whole_file(before) as temporary:
            temporary.write_bytes(content)
        for fault in damaged:
            warnings.warn(f"{fault}. The line is dropped; the file as it was is {before}", stacklevel=2)
    if damaged or (content and not content.endswith(b"\n")):
        write_text(path, as_lines(records))


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks, such as some network file systems of clusters."""


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` in the ``with`` block; create the file if needed, and empty it.

    On a file system without locks, a warning says so and nothing is held. Raise ValueError if another process holds the
    lock, and ``wait`` is False, OSError if the file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
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
            warnings.warn(f"{path} cannot be locked ({error.strerror}): run one process at a time there", stacklevel=3)
        yield


_STAMPS = ".verified"
"""Folder of the stamps, beside the files."""
_SETTLED_SECONDS = 2.0
"""A file that changed more recently gets no stamp: it may change again before the clock of the file system ticks."""


def has_digest(path: Path, digest: str, *, stamped: bool, and_holds: Callable[[], bool] = lambda: True) -> bool:
    """Return whether the file's SHA-256 is ``digest`` and its content passes the check ``and_holds``.

    With ``stamped``, do not read the file if a stamp says so. A file that was read gets a stamp, if its folder can be
    written: its size and the times of its last change of content and of metadata. No program can set the latter back,
    so a stamp does not fit a file that was replaced or written to.
    """
    stamp, found = path.parent / _STAMPS / f"{path.name}.json", path.stat()
    wanted = {"sha256": digest, "size": found.st_size, "modified": found.st_mtime_ns, "changed": found.st_ctime_ns}
    with suppress(OSError, ValueError):  # without a stamp, or with a damaged one
        if stamped and parse_json(stamp.read_bytes()) == wanted:
            return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest or not and_holds():
            return False
    if time.time() - found.st_mtime_ns / 1e9 > _SETTLED_SECONDS:
        with suppress(OSError):
            stamp.parent.mkdir(exist_ok=True)
            write_text(stamp, json.dumps(wanted) + "\n")
    return True
