"""What two sources have in common, before either is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gecko.data.corpus import HUGGING_FACE, find_sources
from gecko.data.shards import is_shard_folder


def check_apart(validation: str, training: Iterable[str]) -> None:
    """ValueError where a file, a folder of shards or a data set's split is both trained on and held out.

    Files are the same if their paths are, links followed.
    """
    held_out = _things(validation)
    shared = sorted({thing for source in training for thing in _things(source)} & held_out)
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise ValueError(
            f"data.validation must hold other texts than those trained on; got {validation!r}, of which {shared[0]}"
            f"{more} would be trained on too. Keep held-out files in a folder of their own, or name the training "
            "files with a glob that leaves them out."
        )


def check_disjoint(mixture: Iterable[str]) -> None:
    """ValueError where two sources of a mixture share a file, a folder of shards or a data set's split.

    Each source holds out documents of its own, and the other one would train on them.
    """
    owner: dict[str, str] = {}
    for source in mixture:
        for thing in sorted(_things(source)):
            if thing in owner:
                raise ValueError(
                    f"sources of a mixture that hold out a part of their documents must have none in common; {thing} "
                    f"is in {owner[thing]!r} and in {source!r}, so what one holds out the other would train on. Name "
                    "files with globs that leave each other's out, or held-out files of their own with data.validation."
                )
            owner[thing] = source


def _things(source: str) -> set[str]:
    if is_shard_folder(source):
        return {str(Path(source).expanduser().resolve())}
    parts = [part for found in find_sources(source) for part in found.parts]
    if source.startswith(HUGGING_FACE):
        return {f"{part.name} ({part.config}, {part.split})" for part in parts}
    return {str(Path(part.name).resolve()) for part in parts}
