"""Documents from wherever they are: files, folders, globs, data sets by name, the standard library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
    specs = [os.fspath(source)] if isinstance(source, str | os.PathLike) else list(source)
    if not specs or not all(specs):
        raise ValueError(f"a source of documents must be named, such as a folder or {STDLIB!r}; got {source!r}.")
    seen: set[Path] = set()
    opened = [(spec, _open_source(spec, field, seen)) for spec in specs]
    return _checked([(spec, read) for spec, read in opened if read is not None])


def _open_source(spec: str, field: str, seen: set[Path]) -> Callable[[], Iterator[str]] | None:
    """What reads the source's documents, or None when earlier sources do; adds its files to ``seen``."""
    if spec.startswith(HUGGING_FACE):
        name, config, split = _parse_dataset(spec)
        return lambda: _read_dataset(name, config, split, field)
    files = stdlib_files() if spec == STDLIB else find_files(spec)
    # A document read twice could end up in the training and in the validation part.
    fresh = [path for path in files if path.resolve() not in seen]
    seen.update(path.resolve() for path in fresh)
    if not fresh:
        return None
    if spec == STDLIB:
        return lambda: _read_stdlib(fresh)
    return lambda: (text for path in fresh for text in read_file(path, field))


def _checked(sources: list[tuple[str, Callable[[], Iterator[str]]]]) -> Iterator[str]:
    for spec, read in sources:
        empty = True
        for text in read():
            if text:
                empty = False
                yield text
        if empty:
            raise ValueError(f"a source must hold at least one document with text; got {spec!r}, which is empty.")


def _read_stdlib(files: list[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield decode_text(path.read_bytes(), str(path))
        except ValueError:
            # The library holds a few files in other encodings; nobody chose them, so they are left out.
            continue


def _read_dataset(name: str, config: str | None, split: str, field: str) -> Iterator[str]:
    datasets = require("datasets", "data")
    try:
        records = datasets.load_dataset(name, config, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the Hugging Face data set {name!r} (configuration {config}, split {split!r}) must be one that can be "
            f"reached, as hf:NAME[:split] or hf:NAME:CONFIG:split; got: {error}"
        ) from error
    for number, record in enumerate(records):
        yield text_field(record, field, f"{name}, record {number},")


def _parse_dataset(spec: str) -> tuple[str, str | None, str]:
    parts = spec.removeprefix(HUGGING_FACE).split(":")
    if len(parts) > 3 or not all(parts):
        raise ValueError(f"a data set must be named as hf:NAME[:split] or hf:NAME:CONFIG:split; got {spec!r}.")
    name, *rest = parts
    split = rest.pop() if rest else "train"
    return name, rest[0] if rest else None, split
