"""Folders of models: runs and their newest sound checkpoint, and trained models that are installed with the package.

A shipped model is a model folder inside the package, ``gecko/shipped/NAME``, with a model card (``README.md``) and the
recipe that trained it. Everything that takes a model folder also takes its name: ``gecko.load("books")``.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

from gecko.io.files import Record, inner_name, parse_object
from gecko.io.model_folder import WEIGHTS, check_one_model, weight_files

MANIFEST, PREFIX = "manifest.json", "step-"
CHECKPOINTS, SHARDS = "checkpoints", "shards"
"""Folder of the checkpoints in that of a run, and of the parts that several ranks wrote in that of a checkpoint."""
_REMEDY = "Use an older checkpoint, or copy this one again."

Entries = dict[str, dict[str, str | int]]
"""Size and SHA-256 of each file, by its path in the checkpoint."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{PREFIX}{step:08d}"


def checkpoint_step(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in the folder, newest first, including damaged ones."""
    return sorted((p for p in folder.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()), reverse=True)


def verify_files(path: Path, part: int = 0, parts: int = 1) -> None:
    """Check that every ``parts``-th file from ``part`` on has the size and SHA-256 in the checkpoint's manifest. Raise
    FileNotFoundError, ValueError or OSError if one is missing, damaged or cannot be read; the message names it."""
    for name, entry in sorted(read_manifest(path).items())[part::parts]:
        file = path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} must be there, as {path / MANIFEST} lists it. {_REMEDY}")
        if file.stat().st_size != entry["bytes"]:
            raise ValueError(f"{file} must be {entry['bytes']} bytes; got {file.stat().st_size}. {_REMEDY}")
        if (found := sha256(file)) != entry["sha256"]:
            raise ValueError(f"{file} is damaged: its sha256 must be {entry['sha256']}; got {found}. {_REMEDY}")


def read_manifest(path: Path) -> Entries:
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise FileNotFoundError(f"{manifest} must be there; {path} is no finished checkpoint. {_REMEDY}")

    def parse(content: Record) -> Entries:
        if not (entries := content["files"].items()):
            raise ValueError("it names none")
        return {inner_name(name): {"bytes": int(x["bytes"]), "sha256": str(x["sha256"])} for name, x in entries}

    return parse_object(manifest, "the checkpoint's files with size and sha256", parse)


def find_fault(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return the message of ``verify_files`` for a checkpoint that is not sound; None for a sound one."""
    try:
        verify_files(path, part, parts)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def check_one_is_sound(folder: Path, damaged: list[Path]) -> None:
    """Raise ValueError if there are checkpoints and all are damaged."""
    if damaged:
        raise ValueError(
            f"{folder} must hold an undamaged checkpoint; all of {', '.join(path.name for path in damaged)} are "
            "damaged. Copy a good one there, or start again in another folder with output=."
        )


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint of a folder, with a warning for each damaged one; None if it has none.
    Raise ValueError if all are damaged."""
    candidates = list_checkpoints(folder)
    for path in candidates:
        fault = find_fault(path)
        if fault is None:
            return path
        warnings.warn(skipped(path, fault), stacklevel=2)
    check_one_is_sound(folder, candidates)
    return None


def skipped(path: Path, fault: str) -> str:
    return f"skipping the checkpoint {path.name}: {fault}"


def model_folder(folder: str | Path) -> Path:
    """Return the folder of a model's files: for a training run its newest undamaged checkpoint, else ``folder`` itself.

    The name of a shipped model stands for its folder, if no model or run here has this name. Raise FileNotFoundError if
    a run has no checkpoint yet, or several ranks wrote the checkpoint in parts, ValueError if all checkpoints of a run
    are damaged, or it also holds the files of another model.
    """
    given = shipped_folder(folder) or Path(folder).expanduser()
    run = given / CHECKPOINTS
    check_one_model(given)
    found = newest_checkpoint(run) if run.is_dir() and not weight_files(given) else given
    if found is None:
        raise FileNotFoundError(f"{given} must hold a model or a run with a checkpoint; the run has none yet.")
    if (found / SHARDS).is_dir() and not (found / WEIGHTS).is_file():
        raise FileNotFoundError(
            f"{found} must hold {WEIGHTS}; it is a checkpoint of several ranks, each of which wrote its part. "
            f"Join them: gecko consolidate {given}"
        )
    return found


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SHIPPED = Path(__file__).resolve().parent.parent / "shipped"
_FILES = ("config.json", "model.safetensors", "recipe.json", "sessions.jsonl", "checkpoints")
"""Files by which a folder is known as a model or a run, even if others are missing."""


def shipped_models() -> list[str]:
    """Return the names of the models that are installed with the package."""
    return sorted(entry.name for entry in SHIPPED.glob("*") if (entry / "config.json").is_file())


def shipped_folder(name: str | Path) -> Path | None:
    """Return the folder of the shipped model ``name``; None if there is none, or if a model or run here has this name.

    Another file or folder of this name, such as one with texts, does not hide the shipped model.
    """
    if str(name) not in shipped_models() or any((Path(name) / file).exists() for file in _FILES):
        return None
    return SHIPPED / name
