"""A tokenized corpus on disk: shards that are mapped into memory, and a manifest that says what they are.

A shard is three files. ``NAME.ds`` and ``NAME.ds.index`` are what datatrove writes: the ids of all documents
end to end, little-endian, and where each document ends, in tokens, as uint64. ``NAME.ds.bytes`` holds the bytes
of each document's text as uint64. ``NAME.json`` says how large they are and their SHA-256; it is written last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gecko.data.tokenizers import Tokenizer

MANIFEST = "manifest.json"
FORMAT = "gecko-shards-1"
SUFFIXES = (".ds", ".ds.index", ".ds.bytes")
COUNT_BYTES = 8
"""Bytes of a number in ``.ds.index`` and ``.ds.bytes``."""
VERIFYING_THREADS = 4


@dataclass(frozen=True)
class ShardRecord:
    """What a shard's ``NAME.json`` says, and its line in the manifest."""

    name: str
    source: str
    documents: int
    tokens: int
    """Border tokens included."""
    text_bytes: int
    """Of all documents, in UTF-8."""
    sha256: tuple[str, ...]
    """Of the files, in the order of ``SUFFIXES``."""


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer made the ids."""

    name: str
    digest: str
    vocab_size: int
    document_start: int
    document_end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        return cls(*(getattr(tokenizer, field.name) for field in dataclasses.fields(cls)))

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.vocab_size)


@dataclass(frozen=True)
class Manifest:
    tokenizer: TokenizerRecord
    shards: tuple[ShardRecord, ...]

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """ValueError where the file is none that ``gecko tokenize`` writes."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            shards = tuple(ShardRecord(**{**shard, "sha256": tuple(shard["sha256"])}) for shard in content["shards"])
            return cls(TokenizerRecord(**content["tokenizer"]), shards)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} must be a manifest of token shards ({FORMAT}) as gecko tokenize writes it; {error}."
            ) from error

    def to_json(self) -> str:
        totals = {name: sum(getattr(shard, name) for shard in self.shards) for name in _TOTALS}
        return json.dumps({"format": FORMAT, "dtype": self.tokenizer.dtype.name, **totals, **dataclasses.asdict(self)},
                          indent=1)  # fmt: skip


_TOTALS = ("documents", "tokens", "text_bytes")


@dataclass(frozen=True)
class Shard:
    """One shard's arrays, mapped when they are first looked at."""

    folder: Path
    record: ShardRecord
    dtype: np.dtype[Any]

    @cached_property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """(tokens,)"""
        return self._map(".ds", self.dtype)

    @cached_property
    def ends(self) -> NDArray[np.uint64]:
        """(documents,) where each document ends, in tokens."""
        return self._map(".ds.index", np.dtype("<u8"))

    @cached_property
    def text_bytes(self) -> NDArray[np.uint64]:
        """(documents,)"""
        return self._map(".ds.bytes", np.dtype("<u8"))

    def document_start(self, document: int) -> int:
        """Where a document starts, in tokens; of the one past the last, where the shard ends."""
        return int(self.ends[document - 1]) if document else 0

    def file(self, suffix: str) -> Path:
        return self.folder / (self.record.name + suffix)

    def check_sizes(self) -> None:
        """ValueError where a file is missing or has another size than it was written with."""
        counts = (self.record.documents * COUNT_BYTES,) * 2
        for suffix, size in zip(SUFFIXES, (self.record.tokens * self.dtype.itemsize, *counts), strict=True):
            path = self.file(suffix)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                got = "there is none" if found is None else f"it has {found:,}"
                raise ValueError(f"{path} must have {size:,} bytes; {got}. {_REMEDY}")

    def check_digests(self) -> None:
        """ValueError where a byte has changed."""
        for suffix, digest in zip(SUFFIXES, self.record.sha256, strict=True):
            with self.file(suffix).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise ValueError(f"{self.file(suffix)} is damaged: it does not match its SHA-256. {_REMEDY}")

    def _map(self, suffix: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.memmap(self.file(suffix), dtype, mode="r")


_REMEDY = "Restore it from a copy; or delete it, and gecko tokenize with the same arguments writes it again."


@dataclass(frozen=True)
class ShardFolder:
    """A folder that ``gecko tokenize`` wrote; shards without documents are left out."""

    folder: Path
    tokenizer: TokenizerRecord
    shards: tuple[Shard, ...]

    @classmethod
    def open(cls, folder: str | Path) -> ShardFolder:
        """ValueError where it is no such folder, or a file is missing or has another size."""
        folder = Path(folder).expanduser()
        manifest = Manifest.load(folder)
        shards = tuple(
            Shard(folder, record, manifest.tokenizer.dtype) for record in manifest.shards if record.documents
        )
        for shard in shards:
            shard.check_sizes()
        return cls(folder, manifest.tokenizer, shards)

    @property
    def digest(self) -> str:
        """Of all shards' digests."""
        digests = [digest for shard in self.shards for digest in shard.record.sha256]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    @property
    def documents(self) -> int:
        return sum(shard.record.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.record.tokens for shard in self.shards)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """ValueError where ``tokenizer`` is another than the shards were made with."""
        if tokenizer.digest != self.tokenizer.digest:
            raise ValueError(
                f"the shards in {self.folder} were made with the tokenizer {self.tokenizer.name!r} "
                f"({self.tokenizer.vocab_size} ids, sha256 {self.tokenizer.digest[:12]}); got {tokenizer.name!r} "
                f"({tokenizer.vocab_size} ids, {tokenizer.digest[:12]}). Set data.tokenizer={self.tokenizer.name}, "
                "or tokenize the text again."
            )

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Read every byte of each ``ranks``-th shard from ``rank`` on; ValueError for one that has changed."""
        with ThreadPoolExecutor(VERIFYING_THREADS) as pool:
            for _ in pool.map(Shard.check_digests, self.shards[rank::ranks]):
                pass


def is_shard_folder(source: str) -> bool:
    return (Path(source).expanduser() / MANIFEST).is_file()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
