"""Documents of one file: plain text, JSON Lines or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gecko.data.compression import COMPRESSED_SUFFIXES, read_pieces
from gecko.extras import require

PARQUET_BATCH_ROWS = 1024
BYTE_ORDER_MARK = "\ufeff"
_NAME_IT = "Name the one that holds the text: data.field=NAME in training, --field NAME for gecko tokenize."


def read_file(path: Path, field: str) -> Iterator[str]:
    """Documents of one file, in order: one of a text file, one for each record of the other formats.

    Args:
        path: ``.jsonl`` and ``.parquet`` hold records, anything else is text; ``.gz`` and ``.zst``
            may follow the suffix of text and JSON Lines.
        field: the records' field, or column, that holds the text.

    Raises:
        ValueError: the content is not what the suffix says; names the file and the place in it.
    """
    compressed = path.suffix.lower() in COMPRESSED_SUFFIXES
    suffix = (path.with_suffix("") if compressed else path).suffix.lower()
    if suffix == ".jsonl":
        return _read_json_lines(path, field)
    if suffix == ".parquet" and not compressed:
        return _read_parquet(path, field)
    return _read_text(path)


def decode_text(content: bytes, where: str) -> str:
    """UTF-8 text without a byte-order mark; ``where`` names the content in the error."""
    zero = content.find(0)
    if zero >= 0:
        raise _binary(where, "a NUL byte", zero)
    try:
        return content.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise _binary(where, f"the invalid byte 0x{content[error.start]:02x}", error.start) from error


def _binary(where: str, found: str, offset: int) -> ValueError:
    return ValueError(
        f"{where} must be UTF-8 text; got {found} at byte offset {offset}. Save it as UTF-8, "
        f"or leave it out by naming the files with a glob such as 'folder/**/*.txt'."
    )


def _read_text(path: Path) -> Iterator[str]:
    yield decode_text(b"".join(read_pieces(path)), str(path))


def _read_json_lines(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_split_lines(read_pieces(path)), start=1):
        if line.strip():
            where = f"{path}, line {number},"
            yield _parse_record(decode_text(line, where), where, field)


def _split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    unfinished: list[bytes] = []
    for piece in pieces:
        first, *rest = piece.split(b"\n")
        unfinished.append(first)
        if rest:
            yield b"".join(unfinished)
            yield from rest[:-1]
            unfinished = [rest[-1]]
    yield b"".join(unfinished)


def _parse_record(line: str, where: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # numbers too long and lists too deep for Python among them
        raise ValueError(f"{where} must hold one JSON object; got invalid JSON ({error}).") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} must hold one JSON object; got a {type(record).__name__}.")
    text = text_field(record, field, where)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} must hold text that UTF-8 can write; got half a surrogate pair.") from error
    return text


def text_field(record: dict[str, Any], field: str, where: str) -> str:
    """The text in a record's ``field``; ``where`` names the record in the error."""
    if field not in record:
        raise ValueError(
            f"{where} must have the field {field!r} with the document's text; got the fields {sorted(record)}. "
            f"{_NAME_IT}"
        )
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{where} must hold a string in its field {field!r}; got {_json_type(text)}.")
    return text


def _json_type(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    pyarrow = require("pyarrow", "data")
    parquet = require("pyarrow.parquet", "data")
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow.names, path, field)
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[field]):
                for record in batch.to_pylist():
                    row += 1
                    yield text_field(record, field, f"{path}, row {row},")
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} must be a whole Parquet file; got one that is truncated or damaged ({error}). "
            f"Copy or download it again."
        ) from error


def _check_column(columns: list[str], path: Path, field: str) -> None:
    if field not in columns:
        raise ValueError(
            f"{path} must have the column {field!r} with the documents' text; got the columns {columns}. {_NAME_IT}"
        )
