"""Sources of documents: files, folders, globs, Hugging Face data sets, the standard library.

A source's files have a fixed order, and files that two sources share are found before either is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import filecmp
import fnmatch
import glob
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gecko.data.readers import decode_text, format_of, read_file, text_field
from gecko.data.shards import MANIFEST, Manifest, is_shard_folder
from gecko.runtime.process import cached_data_sets_without_network, require

STDLIB = "stdlib"  # name of the source that reads the .py files of the Python standard library
HUGGING_FACE = "hf:"
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"})
"""Folders in the standard library's folder that the source leaves out."""
_LEFTOVER = re.compile(
    r"\..*|.*~|~\$.*|#.*#|.*\.(bak|orig|rej|sw[a-p]|tmp)|(eh)?thumbs\.db|desktop\.ini", re.IGNORECASE
)
"""Names of hidden files, and of those that editors and systems leave beside documents."""


COPIED = 0.01
"""Largest share of the held-out bytes in files that have a copy among those trained on, such as licenses."""


def find_files(source: str) -> list[Path]:
    """Return the files of a path, a folder (at any depth) or a glob, sorted by path.

    Hidden files, and backups of editors, are left out unless the path or the glob names such files. Raise
    FileNotFoundError if the path does not exist, or the folder or glob has no files.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if files := [path for path in _matching(path, ("**",)) if not _LEFTOVER.fullmatch(path.name)]:
            return files
        raise FileNotFoundError(
            f"a folder of documents must hold at least one file, hidden ones and backups not counted; got "
            f"{str(path)!r} with none."
        )
    if path.exists():
        return [path]
    if glob.has_magic(source):
        start, named = Path(path.anchor or "."), _LEFTOVER.fullmatch(path.name)
        found = _matching(start, path.parts[bool(path.anchor) :])
        if files := [one for one in found if named or not _LEFTOVER.fullmatch(one.name)]:
            return sorted(files, key=Path.as_posix)
        raise FileNotFoundError(
            f"a glob must match at least one file; got {source!r}, which matches none. "
            f"'**' stands for any depth of folders, as in 'folder/**/*.txt'."
        )
    beside = path.parent.iterdir() if path.parent.is_dir() and not path.is_symlink() else ()
    near = difflib.get_close_matches(path.name, [STDLIB, *(entry.name for entry in beside)], n=1)
    hint = f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""
    lies = "is a link that leads to no file" if path.is_symlink() else "does not exist"
    choices = f"a source of documents must be a file, a folder, a glob, 'hf:NAME' or {STDLIB!r}"
    raise FileNotFoundError(f"{choices}; got {source!r}, which {lies}.{hint}")


def stdlib_files() -> list[Path]:
    """Return the ``.py`` files of the Python standard library on this machine, sorted by path, without its tests. Raise
    FileNotFoundError if this Python's library is not stored in ``.py`` files."""
    root = Path(sysconfig.get_path("stdlib"))
    below = (path for path in _matching(root, ("**",), NOT_STDLIB) if path.suffix == ".py")
    # The build configuration differs from machine to machine and is not part of the library's source.
    if files := [path for path in below if not path.name.startswith("_sysconfigdata")]:
        return files
    raise FileNotFoundError(
        f"the source {STDLIB!r} needs the standard library's .py files; got none in {root}. "
        f"Name your own files, or use a full installation of Python."
    )


def _matching(root: Path, pattern: Sequence[str], skipped: Collection[str] = ()) -> list[Path]:
    """Return what is no folder below ``root`` and matches the parts of a glob, sorted by path; links are followed.

    Hidden names match only parts that name them. A loop of links ends where it comes back to a folder. Raise OSError if
    a folder cannot be listed.
    """
    found, waiting, seen = dict[Path, None](), [(root, tuple(pattern))], set[tuple[str, int]]()
    while waiting:
        folder, (first, *rest) = waiting.pop()
        if (place := (os.path.realpath(folder), len(rest))) in seen:
            continue
        seen.add(place)
        if first == "**" and rest:
            waiting.append((folder, tuple(rest)))
        entries = [folder / first] if os.path.lexists(folder / first) else []
        if glob.has_magic(first):
            listed = [entry for entry in folder.iterdir() if entry.name not in skipped]
            entries = [x for x in listed if fnmatch.fnmatch(x.name, first) and (x.name[0] != "." or first[0] == ".")]
        for entry in entries:
            if not entry.is_dir():
                found |= {} if rest else {entry: None}
            elif rest or first == "**":
                waiting.append((entry, (first, *rest) if first == "**" else tuple(rest)))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def load_documents(source: str | os.PathLike[str] | Sequence[str], *, field: str = "text") -> Iterator[str]:
    """Return an iterator over the non-empty documents of one source or of several, always in the same order.

    Args:
        source: a text file (one document), ``.jsonl``, ``.ndjson``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet``
            (one document per record), ``.gz`` or ``.zst`` of these but Parquet, a folder (every file at any
            depth), a glob, ``hf:NAME[:split]`` or ``hf:NAME:CONFIG:split`` (a Hugging Face data set, streamed), or
            ``stdlib`` (the Python standard library's source files); or a list of these.
        field: field, or column, of records that holds the text.

    Returns:
        An iterator. Files are found in this call and read during iteration. A file that
        several sources name is read once.

    Raises:
        FileNotFoundError: in this call, a source names no file.
        ValueError: in this call, there is no source, or a file's suffix is of a format that cannot be read; while
            iterating, a file is binary, truncated or malformed, or a source holds no text.
    """

    def texts(sources: list[Source]) -> Iterator[str]:
        for spec, parts in sources:
            empty = True
            for text in (text for part in parts for text in part.read() if text):
                empty = False
                yield text
            if empty:
                raise empty_source(spec)

    return texts(find_sources(source, field=field))


def empty_source(spec: str) -> ValueError:
    return ValueError(f"a source must hold at least one document with text; got {spec!r}, which is empty.")


@dataclass(frozen=True)
class SourcePart:
    """Unit of reading: one file, a data set, or a piece of a data set. All fields can be written as JSON."""

    kind: Literal["file", "stdlib", "dataset"]
    name: str  # the file's path, or the data set's name
    field: str
    size: int = 0  # size of the file in bytes; 0 for a data set, whose size is not known before it is read
    config: str | None = None
    split: str = ""
    piece: int = 0  # index of this piece of the data set
    pieces: int = 1

    def read(self) -> Iterator[str]:
        """Yield the documents in order; they may be empty. Errors are those of ``load_documents``."""
        if self.kind == "dataset":
            records = self.open_dataset()
            where = self.name
            if self.pieces > 1:
                records = records.shard(num_shards=self.pieces, index=self.piece)
                where = f"{where}, piece {self.piece} of {self.pieces}"
            for number, record in enumerate(records):
                yield text_field(record, self.field, f"{where}, record {number},")
        elif self.kind == "file":
            yield from read_file(Path(self.name), self.field)
        else:
            # A few files of the library have other encodings. The user did not choose them, so they are left out.
            with suppress(ValueError):
                yield decode_text(Path(self.name).read_bytes(), self.name)

    def open_dataset(self) -> Any:
        datasets = require("datasets", "data")
        try:
            with cached_data_sets_without_network("data"):
                return datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the Hugging Face data set {self.name!r} (configuration {self.config}, split {self.split!r}) must be "
                f"one that can be reached, as hf:NAME[:split] or hf:NAME:CONFIG:split; got: {error}"
            ) from error

    def divided(self) -> tuple[SourcePart, ...]:
        """Return the pieces of a data set, which can be read in parallel, in its order; a file as it is."""
        if self.kind != "dataset":
            return (self,)
        pieces = self.open_dataset().num_shards
        return tuple(dataclasses.replace(self, piece=piece, pieces=pieces) for piece in range(pieces))


Source = tuple[str, tuple[SourcePart, ...]]
"""Name of a source, and its parts without the files of earlier sources."""


def find_sources(source: str | os.PathLike[str] | Sequence[str], *, field: str = "text") -> list[Source]:
    """Find the files and data sets of one source or of several; arguments and errors as for ``load_documents``.

    A source is left out if all its files belong to earlier sources.
    """
    specs = [os.fspath(source)] if isinstance(source, str | os.PathLike) else list(source)
    if not specs or not all(specs):
        raise ValueError(f"a source of documents must be named, such as a folder or {STDLIB!r}; got {source!r}.")
    seen: set[Path] = set()
    return [(spec, parts) for spec in specs if (parts := _find_parts(spec, field, seen))]


def _find_parts(spec: str, field: str, seen: set[Path]) -> tuple[SourcePart, ...]:
    """Return the parts of a source without the files in ``seen``, and add its files to ``seen``."""
    if spec.startswith(HUGGING_FACE):
        name, *rest = named = spec.removeprefix(HUGGING_FACE).split(":")
        if len(named) > 3 or not all(named):
            raise ValueError(f"a data set must be named as hf:NAME[:split] or hf:NAME:CONFIG:split; got {spec!r}.")
        split = rest.pop() if rest else "train"
        return (SourcePart("dataset", name, field, config=rest[0] if rest else None, split=split),)
    # A document that is read twice, also through a link, could be in the training and in the validation part.
    fresh = []
    for path in stdlib_files() if spec == STDLIB else find_files(spec):
        if (real := path.resolve()) not in seen:
            seen.add(real)
            # Refuse a format now, not after hours of reading other files.
            format_of(path)
            fresh.append(SourcePart("stdlib" if spec == STDLIB else "file", str(path), field, path.stat().st_size))
    return tuple(fresh)


def sample_texts(parts: Sequence[SourcePart], characters: int) -> Iterator[str]:
    """Yield up to ``characters`` of the texts of evenly spaced parts, of long texts pieces from all over."""
    chosen = parts[:: max(1, len(parts) // 64)]
    for part in chosen:
        left = characters // len(chosen) + 1
        for text in part.read():
            pieces = 16 if len(text) > left else 1
            for begin in range(0, len(text), len(text) // pieces + 1):
                yield text[begin : begin + left // pieces + 1]
            if (left := left - len(text)) <= 0:
                break


def check_apart(validation: str, training: Iterable[str]) -> None:
    """Raise ValueError if a file, a folder of shards or a data set's split is both trained on and held out.

    Files are compared by their resolved paths, and by content: copies may be ``COPIED`` of the held-out bytes.
    """
    held_out = _things(validation)
    trained = {thing for source in training for thing in _things(source) | _tokenized(source)}
    named = sorted(held_out & trained)
    if shared := named or _copies(held_out, trained):
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        too = "too" if named else "too, from a file with the same bytes"
        raise ValueError(
            f"data.validation must hold other texts than those trained on; got {validation!r}, of which {shared[0]}"
            f"{more} would be trained on {too}. Keep held-out files in a folder of their own, or name the training "
            "files with a glob that leaves them out."
        )


def _copies(held_out: Collection[str], trained: Collection[str]) -> list[str]:
    """Return the held-out files with a copy that is trained on; none if they have less than ``COPIED`` of the bytes."""
    of_size = defaultdict[int, list[str]](list)
    for path in filter(os.path.isfile, trained):
        of_size[os.path.getsize(path)].append(path)
    sizes = {path: os.path.getsize(path) for path in filter(os.path.isfile, held_out)}
    found = [x for x in sizes if any(filecmp.cmp(x, other, shallow=False) for other in of_size[sizes[x]])]
    return sorted(found) if sum(sizes[x] for x in found) > COPIED * sum(sizes.values()) else []


def check_disjoint(mixture: Iterable[str]) -> None:
    """Raise ValueError if two sources of a mixture share a file, a folder of shards or a data set's split: each holds
    out some of its documents, and the other would train on them."""
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
    return _texts(source)


def _tokenized(source: str) -> set[str]:
    """Return what shards were made of, as far as it is still there; files that changed after that are other texts."""
    if not is_shard_folder(source):
        return set()
    folder, found = Path(source).expanduser(), set[str]()
    made = (folder / MANIFEST).stat().st_mtime
    for spec in {shard.source for shard in Manifest.load(folder).shards}:
        with suppress(OSError, ValueError):
            found |= {x for x in _texts(spec) if not os.path.isfile(x) or os.path.getmtime(x) <= made}
    return found


def _texts(source: str) -> set[str]:
    parts = [part for _, found in find_sources(source) for part in found]
    if source.startswith(HUGGING_FACE):
        return {f"{part.name} ({part.config or 'default'}, {part.split})" for part in parts}
    return {str(Path(part.name).resolve()) for part in parts}
