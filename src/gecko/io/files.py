"""Atomic files, safetensors files with a checksum, and the lock that keeps a folder to one process. No pickle."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gecko.io.json_files import as_lines, examine_lines

DIGEST = "sha256"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; if the block succeeds, flush that file to disk and rename it to ``path``.

    A symbolic link stays, and its target is replaced. An existing file keeps its mode; a new one gets the default mode.

    Raises:
        FileExistsError: ``path`` exists and is not a regular file.
        OSError: writing failed; the file at ``path`` is unchanged.
    """
    check_replaceable(path)
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, mode = _create_beside(target)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(target)
    except OSError as error:
        raise OSError(
            error.errno, f"could not write {path} ({error.strerror or error}); what was there before is unchanged. "
            "Free some space, or choose another folder."
        ) from error  # fmt: skip
    finally:
        temporary.unlink(missing_ok=True)


def mend_lines(path: Path, fields: Collection[str] = ()) -> None:
    """Rewrite a JSON Lines file without its damaged lines, so that lines can be appended.

    A warning names each damaged line, and a copy of the original file stays beside it as ``NAME.damaged``. A torn last
    line, which a killed process leaves, is dropped without a warning: its record was never complete.

    Args:
        fields: names that every record must have.
    """
    records, faults = examine_lines(path, fields)
    damaged = [fault for fault in faults if not fault.torn]
    if damaged:
        before = path.with_name(f"{path.name}.damaged")
        with whole_file(before) as temporary:
            temporary.write_bytes(path.read_bytes())
        for fault in damaged:
            warnings.warn(f"{fault}. The line is dropped; the file as it was is {before}", stacklevel=2)
    if faults or (path.exists() and not _ends_a_line(path)):
        with whole_file(path) as temporary:
            temporary.write_text(as_lines(records), encoding="utf-8")


def _ends_a_line(path: Path) -> bool:
    content = path.read_bytes()
    return not content or content.endswith(b"\n")


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError if ``path`` exists and is not a regular file."""
    if path.exists() and not path.is_file():
        raise FileExistsError(
            f"{path} must be a file, or the name of a new one; it is a folder, a device or a pipe. Choose another path."
        )


def _create_beside(path: Path) -> tuple[Path, int]:
    """Create an empty file in the folder of ``path``; return it and the mode that it must have when it is renamed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    known = path.stat().st_mode if path.exists() else None
    # Python can read the umask only by setting it, for all threads; so a new file shows which mode it gives.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if known is None else 0o600))
    return temporary, stat.S_IMODE(temporary.stat().st_mode if known is None else known)


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose metadata contains a SHA-256 of all names, tensors and metadata.

    Raises:
        OSError: writing failed; an existing file is unchanged.
    """
    ready = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    with whole_file(Path(path)) as temporary:
        try:
            save_file(ready, temporary, metadata={**metadata, DIGEST: _digest(ready, metadata)})
        except SafetensorError as error:
            raise OSError(None, str(error)) from error


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file that ``save_tensors`` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is of another kind, truncated or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a file written by gecko; there is none. Check the path.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a complete safetensors file; it is not: {error}. {_REMEDY}") from error
    expected = metadata.pop(DIGEST, None)
    if expected is None:
        raise ValueError(f"{path} must have been written by gecko; it carries no {DIGEST} checksum.")
    if _digest(tensors, metadata) != expected:
        raise ValueError(f"{path} is damaged: its content does not match its {DIGEST} checksum. {_REMEDY}")
    return tensors, metadata


_REMEDY = "Restore it from a copy, or write it again."


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks, such as some network file systems of clusters."""


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``, which is created if needed; the lock ends with the process.

    On a file system without locks, a warning says so and nothing is held.

    Args:
        wait: whether to wait for a process that holds the lock.

    Raises:
        ValueError: another process holds the lock, and ``wait`` is False.
        OSError: the file cannot be created.
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
        warnings.warn(f"{path} cannot be locked ({error.strerror}): run one process at a time there", stacklevel=2)
