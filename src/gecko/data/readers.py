"""Readers of one file of documents: plain text, JSON, JSON Lines, CSV or Parquet, compressed with gzip or zstd or not.

The suffix of the file's name decides the format.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from gecko.io.files import found_at, parse_json
from gecko.runtime.process import require

Format = Literal["text", "json lines", "json", "csv", "tsv", "parquet"]

_RECORDS: dict[str, Format] = {
    ".jsonl": "json lines", ".ndjson": "json lines", ".jsonlines": "json lines", ".jl": "json lines", ".json": "json",
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".parquet": "parquet",
}  # fmt: skip
_UNREADABLE = {
    "an archive; unpack it, and name the folder": ".zip .tar .tgz .tbz2 .txz .7z .rar .jar .whl .egg",
    "packed in a way that is not read; unpack it, or pack it with gzip or zstd": ".bz2 .xz .lzma .lz4 .br",
    "a document with a layout; convert it to plain text": ".pdf .ps .doc .docx .odt .rtf .epub .mobi .ppt .pptx .odp",
    "a table in a format that is not read; convert it to .parquet, .jsonl or .csv":
        ".arrow .feather .orc .avro .xls .xlsx .ods .db .sqlite .sqlite3 .h5 .hdf5 .mdb .lmdb",
    "Python objects or arrays, not text; write their text to .jsonl":
        ".pkl .pickle .pt .pth .ckpt .npy .npz .safetensors .joblib .gguf .onnx .tfrecord",
    "an image, a sound or a video, not text; leave it out":
        ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .ico .mp3 .wav .flac .ogg .mp4 .mkv .avi .mov .webm",
    "JSON with a structure of its own; write its text to .jsonl": ".geojson .ipynb .har .webmanifest",
    "a table whose columns are divided in a way that is not read; convert it to .csv": ".psv .ssv",
    "a program, not text; leave it out": ".exe .dll .so .dylib .pyc .class .wasm",
}  # fmt: skip
_REASONS = {suffix: reason for reason, suffixes in _UNREADABLE.items() for suffix in suffixes.split()}

COMPRESSED_SUFFIXES = (".gz", ".zst")
PIECE_BYTES = 1 << 20
PARQUET_BATCH_ROWS = 1024
BYTE_ORDER_MARK = "\ufeff"
_LARGEST_WINDOW = 1 << 31
"""Bytes of the largest zstd window that is read, that of ``zstd --long=31``; reading takes as much memory."""
_LARGEST_CELL = (1 << 31) - 1
"""Characters of a CSV cell: the largest limit that Python's module accepts on every platform."""
_ADVICE = "Name the field that holds the text: data.field=NAME in training, --field NAME for gecko tokenize."
_CHATS = "Chats are learned by gecko finetune MODEL CHATS, or in training with data.format=chat."


def format_of(path: Path) -> Format:
    """Return the format of a file by its suffix: a format of records, or text for any other suffix.

    A suffix of compression may follow the suffix of the content. Raise ValueError if the suffix is that of a format
    that is not text and cannot be read.
    """
    suffix, compressed = _content_suffix(path)
    reason = "compressed Parquet; unpack it" if compressed and suffix == ".parquet" else _REASONS.get(suffix)
    if reason is not None:
        raise ValueError(
            f"{path} must be text, .jsonl, .ndjson, .json, .csv, .tsv or .parquet; got {suffix!r}, which is "
            f"{reason}. To leave it out of a folder, name the files with a glob such as 'folder/**/*.txt'. If it is "
            "text, rename it to end in .txt."
        )
    return _RECORDS.get(suffix, "text")


def check_plain_text(path: Path) -> None:
    """Raise ValueError if the suffix of a file is not that of plain text, so that markup is not read as text."""
    suffix, _ = _content_suffix(path)
    records = "records; write the text of the records to a .txt file" if suffix in _RECORDS else None
    if (reason := records or _REASONS.get(suffix)) is not None:
        raise ValueError(
            f"{path} must be plain text; got {suffix!r}, which is {reason}. To read the file as it is, rename it to "
            "end in .txt."
        )


def _content_suffix(path: Path) -> tuple[str, bool]:
    """Return the lower-case suffix of the content, and whether the suffix of a compression follows it."""
    compressed = path.suffix.lower() in COMPRESSED_SUFFIXES
    return (path.with_suffix("") if compressed else path).suffix.lower(), compressed


def read_pieces(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in pieces, decompressed if its suffix says so. Raise ValueError if the compressed
    data is damaged or truncated."""
    kind = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if kind is None:
        yield from _raw_pieces(path)
        return
    zstandard = require("zstandard", "data") if kind == "zstd" else None
    try:
        # Compressing no text gives some bytes, but the libraries accept none.
        if path.stat().st_size == 0:
            raise EOFError("it is empty")
        if zstandard is None:
            with gzip.open(path) as file:
                yield from iter(lambda: file.read(PIECE_BYTES), b"")
            return
        # The library's file reader does not notice that a file is truncated; a decompression object does.
        frame = None
        for piece in _raw_pieces(path):
            while piece:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
                yield frame.decompress(piece)
                piece = frame.unused_data
                frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("the file ends inside a frame")
    except (EOFError, gzip.BadGzipFile, zlib.error, getattr(zstandard, "ZstdError", EOFError)) as error:
        raise _damaged(path, kind, str(error)) from error


def _raw_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(PIECE_BYTES), b"")


def _damaged(path: Path, kind: str, reason: str) -> ValueError:
    return ValueError(
        f"{path} must be a whole {kind} file; got one that is truncated or damaged ({reason}). "
        f"Copy or download it again."
    )


def read_file(path: Path, field: str) -> Iterator[str]:
    """Yield the documents of one file: the whole of a text file, or the text in the ``field``, or column, of each
    record; see ``format_of``. Raise ValueError if the content is of another format, or the format cannot be read; the
    message names the file and the place in it."""
    check_regular(path)
    match format_of(path):
        case "text":
            yield decode_text(b"".join(read_pieces(path)), str(path))
        case "parquet":
            yield from _read_parquet(path, field)
        case "csv":
            yield from _read_csv(path, field, "excel")
        case "tsv":
            yield from _read_csv(path, field, "excel-tab")
        case json_format:
            for where, record in read_records(path) if json_format == "json lines" else _json_records(path):
                text = text_field(record, field, where)
                check_unicode(text, where)
                yield text


def check_unicode(text: str, where: str) -> None:
    """Raise ValueError if a text has half a surrogate pair; ``where`` names it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} must hold text that UTF-8 can write; got half a surrogate pair.") from error


def check_regular(path: Path) -> None:
    """Raise ValueError if a path is a pipe or another thing that can be read only once, or not at all."""
    if not path.is_file():
        raise ValueError(f"{path} must be a file, because documents are read several times; {found_at(path)}.")


def decode_text(content: bytes, where: str, *, begins: bool = True) -> str:
    """Decode UTF-8 that ``begins`` a text, where a byte-order mark is left out; ``where`` names it in errors."""
    zero = content.find(0)
    if zero >= 0:
        raise _binary(where, "a NUL byte", zero)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _binary(where, f"the invalid byte 0x{content[error.start]:02x}", error.start) from error
    return text.removeprefix(BYTE_ORDER_MARK) if begins else text


def _binary(where: str, found: str, offset: int) -> ValueError:
    return ValueError(
        f"{where} must be UTF-8 text; got {found} at byte offset {offset}. Save it as UTF-8, "
        f"or leave it out by naming the files with a glob such as 'folder/**/*.txt'."
    )


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file, each after its place in the file for errors. Raise ValueError if a line
    is not UTF-8, or not one JSON object."""
    for number, line in enumerate(_split_lines(read_pieces(path)), start=1):
        if line.strip():
            where = f"{path}, line {number},"
            text = decode_text(line, where)
            try:
                record = parse_json(text)
            except ValueError as error:  # also numbers too long, and lists too deep, for Python
                raise ValueError(f"{where} must hold one JSON object; got invalid JSON ({error}).") from error
            yield where, _as_object(record, where)


def _json_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield as ``read_records`` those of a list, of one object, or, as some tools write it, of one object per line."""
    content = decode_text(b"".join(read_pieces(path)), str(path))
    if not content.strip():
        return
    try:
        records = parse_json(content)
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError) or not error.msg.startswith("Extra data"):
            raise ValueError(
                f"{path} must hold a list of JSON objects, one object, or one object a line; got invalid JSON "
                f"({error})."
            ) from error
        yield from read_records(path)
        return
    for number, record in enumerate(records if isinstance(records, list) else [records], start=1):
        where = f"{path}, record {number},"
        yield where, _as_object(record, where)


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


def text_field(record: dict[str, Any], field: str, where: str) -> str:
    """Return the text in a record's ``field``; ``where`` names the record in errors."""
    if field not in record:
        raise ValueError(
            f"{where} must have the field {field!r} with the document's text; got the fields {sorted(record)}. "
            f"{_CHATS if 'messages' in record else _ADVICE}"
        )
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{where} must hold a string in its field {field!r}; got {_json_type(text)}.")
    return text


def _as_object(record: object, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{where} must hold one JSON object; got {_json_type(record)}.")
    return record


def _json_type(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _read_csv(path: Path, field: str, dialect: str) -> Iterator[str]:
    """Read the column ``field`` of a table whose first line names its columns."""
    csv.field_size_limit(_LARGEST_CELL)
    rows = csv.reader(_csv_lines(path), dialect, strict=True)
    try:
        columns = next(rows, None)
        if columns is None:
            return
        _check_column(columns, path, field)
        for row in filter(None, rows):
            if len(row) != len(columns):
                raise ValueError(
                    f"{path}, line {rows.line_num}, must have {len(columns)} cells, one for each of the columns "
                    f"{columns}; got {len(row)}. Put quotes around cells that contain the separator or a line end."
                )
            yield row[columns.index(field)]
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {rows.line_num}, must be CSV with the quotes of RFC 4180; got: {error}. Write it with "
            "a CSV library, or as .jsonl."
        ) from error


def _csv_lines(path: Path) -> Iterator[str]:
    """Yield lines with their line ends, because a cell in quotes may span several lines."""
    line: str | None = None
    for number, content in enumerate(_split_lines(read_pieces(path)), start=1):
        if line is not None:
            yield line + "\n"
        line = decode_text(content, f"{path}, line {number},", begins=number == 1)
    if line:
        yield line


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    pyarrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow.names, path, field)
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[field]):
                for value in batch.column(0):
                    row += 1
                    yield text_field({field: value.as_py()}, field, f"{path}, row {row},")
    except UnicodeDecodeError as error:
        where = f"{path}, row {row}," if row else f"{path}, names of columns,"
        raise _binary(where, f"the invalid byte 0x{error.object[error.start]:02x}", error.start) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, "Parquet", str(error)) from error


def _check_column(columns: list[str], path: Path, field: str) -> None:
    if columns.count(field) > 1:
        raise ValueError(f"{path} must have one column {field!r}; got {columns.count(field)} in {columns}.")
    if field not in columns:
        raise ValueError(
            f"{path} must have the column {field!r} with the documents' text; got the columns {columns}. {_ADVICE}"
        )
