"""Bytes of a file that may be compressed with gzip or zstd, in pieces."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from gecko.extras import require

PIECE_BYTES = 1 << 20
COMPRESSED_SUFFIXES = (".gz", ".zst")
_LARGEST_WINDOW = 1 << 31
"""Of a zstd file, as ``zstd --long=31`` writes it: so much memory reading it takes."""


def read_pieces(path: Path) -> Iterator[bytes]:
    """The file's content in order, decompressed as its suffix says.

    Raises:
        ValueError: the compressed data is damaged or ends too early.
    """
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return _gzip_pieces(path)
    if suffix == ".zst":
        return _zstd_pieces(path)
    return _plain_pieces(path)


def _plain_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _gzip_pieces(path: Path) -> Iterator[bytes]:
    _check_holds_something(path, "gzip")
    try:
        with gzip.open(path) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, "gzip", str(error)) from error


def _zstd_pieces(path: Path) -> Iterator[bytes]:
    zstandard = require("zstandard", "data")
    _check_holds_something(path, "zstd")
    # The library's own file reader takes a truncated file for a short one; a decompression object knows.
    frame = None
    try:
        for piece in _plain_pieces(path):
            while piece:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
                yield frame.decompress(piece)
                piece = frame.unused_data
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise _damaged(path, "zstd", str(error)) from error
    if frame is not None:
        raise _damaged(path, "zstd", "the file ends inside a frame")


def _check_holds_something(path: Path, kind: str) -> None:
    """Of no text at all a compressed file has some bytes; the library takes an empty one for it."""
    if path.stat().st_size == 0:
        raise _damaged(path, kind, "it is empty")


def _damaged(path: Path, kind: str, reason: str) -> ValueError:
    return ValueError(
        f"{path} must be a whole {kind} file; got one that is truncated or damaged ({reason}). "
        f"Copy or download it again."
    )
