"""Checkpoint folders: written atomically, verified by checksum, read without pickle."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError

from gecko.io.checkpoints import (
    MANIFEST,
    PREFIX,
    Entries,
    check_one_is_sound,
    checkpoint_path,
    checkpoint_step,
    find_fault,
    list_checkpoints,
    sha256,
    skipped,
)
from gecko.io.files import write_text
from gecko.parallel.mesh import ALONE, Ranks

_UNFINISHED = ".partial-"
_DIVERGED = "diverged-"
_NOT_FOR_SPACE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers that freeing disk space does not fix."""


def write_checkpoint(folder: Path, step: int, write_files: Callable[[Path], None]) -> Path:
    """Create the checkpoint ``folder/step-N`` from the files that ``write_files(temporary_folder)`` writes.

    The files and a manifest are flushed to disk in a temporary folder, which is then renamed. At any time ``step-N`` is
    either complete or absent, and older checkpoints do not change.
    Raise OSError with advice if the files cannot be written, for example on a full disk.
    """
    try:
        partial = begin_checkpoint(folder, step)
        write_files(partial)
        return complete_checkpoint(partial, step, flushed_entries(partial, all_files(partial)))
    except (OSError, SafetensorError) as error:
        raise write_failure(folder, step, error) from error


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Create and return an empty folder for a new checkpoint. Remove what an interrupted save left behind."""
    partial = folder / f"{_UNFINISHED}{PREFIX}{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    partial.mkdir()
    return partial


def complete_checkpoint(partial: Path, step: int, entries: Entries) -> Path:
    """Turn the folder ``partial`` into the checkpoint of ``step``; ``entries`` describes its files, already flushed."""
    folder = partial.parent
    target = checkpoint_path(folder, step)
    write_manifest(partial, entries)
    for path in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        _sync(path)
    if target.exists():
        target.rename(folder / f"{_UNFINISHED}replaced-{step:08d}")
    partial.rename(target)
    _sync(folder)
    remove_unfinished(folder)
    return target


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def flushed_entries(folder: Path, files: Iterable[Path]) -> Entries:
    """Flush ``files`` to disk and return their entries for the manifest of ``folder``."""
    entries: Entries = {}
    for path in files:
        _sync(path)
        name = path.relative_to(folder).as_posix()
        entries[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return entries


def remove_unfinished(folder: Path) -> None:
    """Delete the files that an interrupted save or removal left behind."""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def keep_newest(
    folder: Path, step: int, keep: int, keep_every: int | None = None, best: Callable[[list[Path]], Path] | None = None
) -> None:
    """Delete old checkpoints. Keep the ``keep`` newest up to ``step`` and those at multiples of ``keep_every``.

    Checkpoints after ``step`` are deleted too: the run that writes ``step`` found them damaged and resumed from an
    earlier one. Checkpoints of steps before ``step`` that ``set_aside`` renamed are also deleted. Of the checkpoints up
    to ``step``, the one that ``best`` chooses is kept too.
    """
    written = list_checkpoints(folder)
    later = [path for path in written if checkpoint_step(path) > step]
    candidates = [path for path in written if checkpoint_step(path) <= step]
    chosen = best(candidates) if best is not None and candidates else None
    earlier = [path for path in candidates[keep:] if path != chosen]
    diverged = [path for path in folder.glob(f"{_DIVERGED}*") if path.name.removeprefix(_DIVERGED).isdigit()]
    passed = [path for path in diverged if int(path.name.removeprefix(_DIVERGED)) < step]
    for path in [
        *later,
        *passed,
        *(path for path in earlier if keep_every is None or checkpoint_step(path) % keep_every),
    ]:
        # Rename first: an interrupted removal must not leave a checkpoint that looks complete.
        doomed = path.rename(folder / f"{_UNFINISHED}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)


def set_aside(folder: Path, step: int) -> str:
    """Rename the checkpoints of ``step`` and later, so that the run resumes from the newest sound one before them.

    Return how to go on after a session that ended in skipped steps.
    """
    written = list_checkpoints(folder)
    bad = [path for path in written if checkpoint_step(path) >= step]
    good = next((path for path in written if path not in bad and find_fault(path) is None), None)
    if good is None and bad:
        return (
            f"start again in another folder with output=: {bad[0].name} has the weights that these steps began with; "
            "there is no undamaged checkpoint before it."
        )
    if good is None:
        return "continue with --resume, which starts at the beginning: there is no checkpoint yet."
    on = f"continue with --resume, which goes on from {good.name}"
    if not bad:
        return f"{on}; it is untouched."
    aside = [folder / path.name.replace(PREFIX, _DIVERGED) for path in bad]
    for path, kept in zip(bad, aside, strict=True):
        shutil.rmtree(kept, ignore_errors=True)  # of an earlier divergence at this step
        path.rename(kept)
    return f"{on}. The weights that these steps began with are in {', '.join(map(str, aside))}."


def latest_checkpoint(folder: Path, ranks: Ranks = ALONE) -> Path | None:
    """Return the newest undamaged checkpoint, or None if the folder has no checkpoint.

    Damaged and unreadable checkpoints are skipped with a warning. All ``ranks`` call this together and get the same
    result or fail together: ValueError if all checkpoints are damaged, OSError if the first rank cannot list them.
    """
    candidates = ranks.main(lambda: list_checkpoints(folder))
    for path in candidates:
        faults = [fault for fault in ranks.gather(find_fault(path, ranks.rank, ranks.world)) if fault is not None]
        if not faults:
            return path
        if ranks.is_main:
            warnings.warn(skipped(path, faults[0]), stacklevel=2)
    ranks.run_or_abort_all(lambda: check_one_is_sound(folder, candidates))
    return None


def write_manifest(folder: Path, entries: Entries) -> None:
    write_text(folder / MANIFEST, json.dumps({"files": entries}, indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_failure(folder: Path, step: int, error: BaseException) -> OSError:
    """Remove the partial checkpoint of ``step``, and return the error to raise because it could not be written."""
    remove_unfinished(folder)
    previous = next((path.name for path in list_checkpoints(folder) if checkpoint_step(path) < step), None)
    kept = f"The previous one, {previous}, is intact." if previous else "There is no earlier one."
    return OSError(
        f"the checkpoint of step {step} could not be written to {folder}: {error}. {kept} {_advice(folder, error)}"
    )


def _advice(folder: Path, error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _NOT_FOR_SPACE:
        return f"Make {folder} a folder that can be written to, and continue with --resume."
    try:
        room = f"{shutil.disk_usage(folder).free / 1e6:.1f} MB are free there; if it takes more, free"
    except OSError:
        room = "Free"
    return f"{room} some space (checkpoint.keep=1 keeps fewer), and continue with --resume."
