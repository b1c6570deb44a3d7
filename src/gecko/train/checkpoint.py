"""Checkpoints: folders that are there whole or not at all, read without pickle, verified by checksum."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

MANIFEST = "manifest.json"
_PREFIX = "step-"
_UNFINISHED = ".partial-"


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08d}"


def checkpoint_step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def write_checkpoint(folder: Path, step: int, write_files: Callable[[Path], None]) -> Path:
    """Make ``folder/step-N`` with what ``write_files(temporary_folder)`` writes, and a manifest of it.

    The files are written and flushed to disk beside the target and renamed in one move, so whatever
    happens meanwhile, ``step-N`` is either whole or absent and older checkpoints are untouched.
    OSError, saying what to do, where the files cannot be written (a full disk).
    """
    target, partial = checkpoint_path(folder, step), folder / f"{_UNFINISHED}{_PREFIX}{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        partial.mkdir()
        write_files(partial)
        _write_manifest(partial)
        _flush(partial)
        if target.exists():
            target.rename(folder / f"{_UNFINISHED}replaced-{step:08d}")
        partial.rename(target)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(_write_failure(folder, step, error)) from error
    remove_unfinished(folder)
    return target


def remove_unfinished(folder: Path) -> None:
    """Delete what an interrupted save or removal left behind."""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def keep_newest(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints."""
    for path in list_checkpoints(folder)[keep:]:
        # Renamed first: a removal cut short must not leave a checkpoint that looks whole.
        doomed = path.rename(folder / f"{_UNFINISHED}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in the folder, newest first, sound or not."""
    return sorted((p for p in folder.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdigit()), reverse=True)


def verify_checkpoint(path: Path) -> None:
    """ValueError or FileNotFoundError, naming the file, unless every file has the size and sha256 of the manifest."""
    for name, entry in read_manifest(path).items():
        file = path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} must be there, as {path / MANIFEST} lists it. {_REMEDY}")
        if file.stat().st_size != entry["bytes"]:
            raise ValueError(f"{file} must be {entry['bytes']} bytes; got {file.stat().st_size}. {_REMEDY}")
        found = _sha256(file)
        if found != entry["sha256"]:
            raise ValueError(f"{file} is damaged: its sha256 must be {entry['sha256']}; got {found}. {_REMEDY}")


def read_manifest(path: Path) -> dict[str, dict[str, str | int]]:
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise FileNotFoundError(f"{manifest} must be there; {path} is no finished checkpoint. {_REMEDY}")
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return {name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])} for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{manifest} must list the checkpoint's files with size and sha256; {error!r}.") from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest sound checkpoint; damaged ones are passed over with a warning. None where there is none at all.

    ValueError where there are checkpoints and all are damaged.
    """
    candidates = list_checkpoints(folder)
    for path in candidates:
        try:
            verify_checkpoint(path)
        except (ValueError, FileNotFoundError) as error:
            warnings.warn(f"skipping the checkpoint {path.name}: {error}", stacklevel=2)
        else:
            return path
    if candidates:
        raise ValueError(
            f"{folder} must hold a sound checkpoint; all of {', '.join(path.name for path in candidates)} are damaged. "
            "Copy a good one there, or start again in another folder with output=."
        )
    return None


_REMEDY = "Use an older checkpoint, or copy this one again."


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_failure(folder: Path, step: int, error: Exception) -> str:
    previous = next((path.name for path in list_checkpoints(folder)), None)
    kept = f"The previous one, {previous}, is intact." if previous else "There is no earlier one."
    try:
        room = f"{shutil.disk_usage(folder).free / 1e6:.1f} MB are free there, and it takes more. "
    except OSError:
        room = ""
    return (
        f"the checkpoint of step {step} could not be written to {folder}: {error}. {room}{kept} "
        "Free some space (checkpoint.keep=1 keeps fewer) and continue with --resume."
    )
