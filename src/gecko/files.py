"""Tensors in files: written whole or not at all, read back only if no byte has changed. No pickle."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

DIGEST = "sha256"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that replaces it once the block has ended well and the disk has it.

    What a link points at is replaced, not the link. A file keeps its mode; a new one has what the umask leaves.

    Raises:
        FileExistsError: there is something else than a file at ``path``.
        OSError: the disk refused; what was at ``path`` before is still there.
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


def check_replaceable(path: Path) -> None:
    """FileExistsError where there is something at ``path`` that a file must not take the place of."""
    if path.exists() and not path.is_file():
        raise FileExistsError(
            f"{path} must be a file, or the name of a new one; it is a folder, a device or a pipe. Choose another path."
        )


def _create_beside(path: Path) -> tuple[Path, int]:
    """An empty file in the folder of ``path``, and the mode for it at the end: that of ``path``, or of any new file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    known = path.stat().st_mode if path.exists() else None
    # The system applies the umask, which Python can only read by setting it for all threads.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if known is None else 0o600))
    return temporary, stat.S_IMODE(temporary.stat().st_mode if known is None else known)


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose metadata holds a SHA-256 over all names, tensors and metadata.

    Raises:
        OSError: the disk refused; a file that was there before survives.
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
    """Tensors and metadata of a file written by ``save_tensors``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, is cut short, or a byte has changed.
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
