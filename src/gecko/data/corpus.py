"""Documents from wherever they are: files, folders, globs, data sets by name, the standard library."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gecko.data.readers import decode_text, read_file, text_field
from gecko.data.sources import STDLIB, find_files, stdlib_files
from gecko.extras import require

HUGGING_FACE = "hf:"


def load_documents(source: str | os.PathLike[str] | Sequence[str], *, field: str = "text") -> Iterator[str]:
    """The documents of one source or of several, none of them empty, always in the same order.

    Args:
        source: a text file (one document), ``.jsonl`` or ``.parquet`` (one document a record),
            ``.gz`` or ``.zst`` of text and ``.jsonl``, a folder (every file at any depth), a glob,
            ``hf:NAME[:split]`` or ``hf:NAME:CONFIG:split`` (a Hugging Face data set, streamed), or
            ``stdlib`` (the Python standard library's source files); or a list of these.
        field: field of JSON Lines, Parquet and data sets that holds the text.

    Returns:
        An iterator. Files are found in this call and read as the iterator goes. A file that
        several sources name is read once.

    Raises:
        FileNotFoundError: in this call, a source names no file.
        ValueError: in this call, there is no source; while iterating, a file is binary, truncated
            or malformed, or a source holds no text.
    """
    return _checked(find_sources(source, field=field))


@dataclass(frozen=True)
class Part:
    """Documents that are read in one go: of one file, or of a data set or a piece of one. JSON holds all its fields."""

    kind: Literal["file", "stdlib", "dataset"]
    name: str
    """The file's path, or the data set's name."""
    field: str
    size: int = 0
    """Bytes of the file; 0 of a data set, which nobody knows before it was read."""
    config: str | None = None
    split: str = ""
    piece: int = 0
    pieces: int = 1
    """The data set's files, in as many pieces of neighbours as it has files, and which of them this is."""

    def read(self) -> Iterator[str]:
        """The documents in order; one may be empty.

        Raises:
            ValueError: see ``load_documents``.
        """
        if self.kind == "dataset":
            return _read_dataset(self)
        return read_file(Path(self.name), self.field) if self.kind == "file" else _read_stdlib(Path(self.name))


@dataclass(frozen=True)
class Source:
    """What one source names, without the files that a source before it named."""

    spec: str
    parts: tuple[Part, ...]


def find_sources(source: str | os.PathLike[str] | Sequence[str], *, field: str = "text") -> list[Source]:
    """Where the documents of one source or of several are; arguments and errors of ``load_documents``.

    A source whose files all belong to earlier ones is left out.
    """
    specs = [os.fspath(source)] if isinstance(source, str | os.PathLike) else list(source)
    if not specs or not all(specs):
        raise ValueError(f"a source of documents must be named, such as a folder or {STDLIB!r}; got {source!r}.")
    seen: set[Path] = set()
    found = [Source(spec, _find_parts(spec, field, seen)) for spec in specs]
    return [source for source in found if source.parts]


def _find_parts(spec: str, field: str, seen: set[Path]) -> tuple[Part, ...]:
    """Adds the source's files to ``seen``, and leaves those out that were there."""
    if spec.startswith(HUGGING_FACE):
        name, config, split = _parse_dataset(spec)
        return (Part("dataset", name, field, config=config, split=split),)
    files = stdlib_files() if spec == STDLIB else find_files(spec)
    # A document read twice, through a link too, could end up in the training and in the validation part.
    fresh = []
    for path in files:
        if (real := path.resolve()) not in seen:
            seen.add(real)
            fresh.append(path)
    kind: Literal["file", "stdlib"] = "stdlib" if spec == STDLIB else "file"
    return tuple(Part(kind, str(path), field, path.stat().st_size) for path in fresh)


def dataset_pieces(part: Part) -> tuple[Part, ...]:
    """A data set as pieces that can be read side by side, together in its order; files stay what they are."""
    if part.kind != "dataset":
        return (part,)
    pieces = _open_dataset(part).num_shards
    return tuple(dataclasses.replace(part, piece=piece, pieces=pieces) for piece in range(pieces))


def _checked(sources: list[Source]) -> Iterator[str]:
    for source in sources:
        empty = True
        for part in source.parts:
            for text in part.read():
                if text:
                    empty = False
                    yield text
        if empty:
            raise empty_source(source.spec)


def empty_source(spec: str) -> ValueError:
    return ValueError(f"a source must hold at least one document with text; got {spec!r}, which is empty.")


def _read_stdlib(path: Path) -> Iterator[str]:
    try:
        yield decode_text(path.read_bytes(), str(path))
    except ValueError:
        # The library holds a few files in other encodings; nobody chose them, so they are left out.
        return


def _read_dataset(part: Part) -> Iterator[str]:
    records = _open_dataset(part)
    if part.pieces > 1:
        records = records.shard(num_shards=part.pieces, index=part.piece)
    where = part.name if part.pieces == 1 else f"{part.name}, piece {part.piece} of {part.pieces}"
    for number, record in enumerate(records):
        yield text_field(record, part.field, f"{where}, record {number},")


def _open_dataset(part: Part) -> Any:
    datasets = require("datasets", "data")
    try:
        return datasets.load_dataset(part.name, part.config, split=part.split, streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the Hugging Face data set {part.name!r} (configuration {part.config}, split {part.split!r}) must be one "
            f"that can be reached, as hf:NAME[:split] or hf:NAME:CONFIG:split; got: {error}"
        ) from error


def _parse_dataset(spec: str) -> tuple[str, str | None, str]:
    parts = spec.removeprefix(HUGGING_FACE).split(":")
    if len(parts) > 3 or not all(parts):
        raise ValueError(f"a data set must be named as hf:NAME[:split] or hf:NAME:CONFIG:split; got {spec!r}.")
    name, *rest = parts
    split = rest.pop() if rest else "train"
    return name, rest[0] if rest else None, split
