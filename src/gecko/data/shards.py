"""Token shards: a tokenized corpus on disk, and its memory-mapped training rows.

A shard has three data files. ``NAME.ds`` and ``NAME.ds.index`` have the format of datatrove: the concatenated ids of
all documents, little-endian, and the end of each document, in tokens, as uint64. ``NAME.ds.bytes`` holds the number of
bytes of each document's text as uint64. ``NAME.json`` holds their sizes and SHA-256 and is written last. A manifest
lists the shards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from gecko.config import LARGEST, Size, whole
from gecko.data.loader import OrderedRows, Row, make_row, rows_in
from gecko.data.packing import (
    LEAST,
    ROW_LAYOUT,
    SPLIT_STREAM,
    Shuffle,
    TokenizedCorpus,
    held_out_count,
    permutation,
    token_dtype,
)  # fmt: skip
from gecko.data.tokenizers import Tokenizer
from gecko.io.files import has_digest, inner_name, parse_object
from gecko.records import build, check

MANIFEST, FORMAT = "manifest.json", "gecko-shards-1"
SUFFIXES = (".ds", ".ds.index", ".ds.bytes")
COUNT_BYTES = 8  # size of a number in .ds.index and .ds.bytes
VERIFYING_THREADS = 4
OPEN_FILES = 256
"""Files of shards that are mapped at a time. Each counts as an open file, of which a process may usually have 1,024."""
HELD_OUT_PLACE, HELD_OUT_ORDER = 1, 2
FIRST_EPOCH = 3
"""Random streams besides ``SPLIT_STREAM``: positions of the held-out runs, order of their documents, epochs."""
_Total = Annotated[int, whole(0, 1 << 48)]
_REMEDY = "Restore it from a copy; or delete it, and gecko tokenize with the same arguments writes it again."


@dataclass(frozen=True)
class ShardRecord:
    """Content of a shard's ``NAME.json``, and its entry in the manifest."""

    name: str
    source: str
    documents: _Total
    tokens: _Total  # border tokens included
    text_bytes: _Total  # bytes in UTF-8 of the text that the ids of all documents stand for
    sha256: tuple[str, ...]  # SHA-256 of the files, in the order of SUFFIXES

    def __post_init__(self) -> None:
        inner_name(self.name)
        check(self)


@dataclass(frozen=True)
class TokenizerRecord:
    """Identity of the tokenizer that made the ids."""

    name: str
    digest: str
    vocab_size: Size
    document_start: Annotated[int, whole(0, LARGEST)]
    document_end: Annotated[int, whole(0, LARGEST)]

    def __post_init__(self) -> None:
        check(self)
        for border in (self.document_start, self.document_end):
            if border >= self.vocab_size:
                raise ValueError(f"a border token must be one of the {self.vocab_size} ids; got {border}.")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        return cls(*(getattr(tokenizer, field.name) for field in dataclasses.fields(cls)))

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.vocab_size)


@dataclass(frozen=True)
class Manifest:
    """One tokenizer, and the shards of a folder that it made."""

    tokenizer: TokenizerRecord
    shards: tuple[ShardRecord, ...]

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read a folder's manifest; raise ValueError unless ``gecko tokenize`` wrote it."""

        def parse(content: dict[str, Any]) -> Manifest:
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}.")
            return build(cls, {name: content[name] for name in ("tokenizer", "shards")})

        return parse_object(folder / MANIFEST, f"a manifest of token shards ({FORMAT}), by gecko tokenize", parse)

    def to_json(self) -> str:
        counted = ("documents", "tokens", "text_bytes")
        totals = {name: sum(getattr(shard, name) for shard in self.shards) for name in counted}
        fields = {"format": FORMAT, "dtype": self.tokenizer.dtype.name, **totals, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=1)


def _file_maps() -> Callable[[Path, np.dtype[Any]], NDArray[Any]]:
    """Return a function that maps a file, and keeps the ``OPEN_FILES`` maps that were used last."""
    return lru_cache(maxsize=OPEN_FILES)(partial(np.memmap, mode="r"))


@dataclass(frozen=True)
class Shard:
    """Arrays of one shard, memory-mapped when they are used."""

    folder: Path
    record: ShardRecord
    dtype: np.dtype[Any]
    maps: Callable[[Path, np.dtype[Any]], NDArray[Any]] = field(default_factory=_file_maps, repr=False, compare=False)
    """Maps the files; shared by the shards of a folder."""

    @property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """(tokens,) ids of all documents."""
        return self.maps(self.file(".ds"), self.dtype)

    @property
    def ends(self) -> NDArray[np.uint64]:
        """(documents,) end of each document, in tokens."""
        return self.maps(self.file(".ds.index"), np.dtype("<u8"))

    @property
    def text_bytes(self) -> NDArray[np.uint64]:
        """(documents,) bytes of each document's text."""
        return self.maps(self.file(".ds.bytes"), np.dtype("<u8"))

    def document_start(self, document: int) -> int:
        """Return the start of a document in tokens; for the index past the last, the end of the shard."""
        return int(self.ends[document - 1]) if document else 0

    def file(self, suffix: str) -> Path:
        return self.folder / (self.record.name + suffix)

    def check_sizes(self) -> None:
        """Raise ValueError if a file is missing or its size has changed."""
        counts = self.record.documents * COUNT_BYTES
        for suffix, size in zip(SUFFIXES, (self.record.tokens * self.dtype.itemsize, counts, counts), strict=True):
            path = self.file(suffix)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                got = "there is none" if found is None else f"it has {found:,}"
                raise ValueError(f"{path} must have {size:,} bytes; {got}. {_REMEDY}")

    def check_digests(self, vocab_size: int, *, stamped: bool) -> None:
        """Raise ValueError if a byte has changed or a number cannot be; ``stamped`` is as in ``has_digest``."""
        checks = (
            lambda: bool(self.tokens.max() < vocab_size),
            lambda: bool(self.ends[-1] == len(self.tokens) and self.ends[0] and (self.ends[1:] > self.ends[:-1]).all()),
            lambda: sum(map(int, self.text_bytes)) == self.record.text_bytes,
        )
        for suffix, digest, holds in zip(SUFFIXES, self.record.sha256, checks, strict=True):
            if not has_digest(self.file(suffix), digest, stamped=stamped, and_holds=holds):
                fault = "it does not match its SHA-256, or no texts have its numbers"
                raise ValueError(f"{self.file(suffix)} is damaged: {fault}. {_REMEDY}")


@dataclass(frozen=True)
class ShardFolder:
    """Folder that ``gecko tokenize`` wrote; shards without documents are left out."""

    folder: Path
    tokenizer: TokenizerRecord
    shards: tuple[Shard, ...]

    @classmethod
    def open(cls, folder: str | Path) -> ShardFolder:
        """Open a folder; raise ValueError if it has no manifest, or a file is missing or has another size."""
        folder = Path(folder).expanduser()
        manifest, maps = Manifest.load(folder), _file_maps()
        records = [record for record in manifest.shards if record.documents]
        shards = tuple(Shard(folder, record, manifest.tokenizer.dtype, maps) for record in records)
        for shard in shards:
            shard.check_sizes()
        return cls(folder, manifest.tokenizer, shards)

    @property
    def digest(self) -> str:
        """SHA-256 of the digests of all shards."""
        return joined_digest([digest for shard in self.shards for digest in shard.record.sha256])

    @property
    def documents(self) -> int:
        return sum(shard.record.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.record.tokens for shard in self.shards)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError unless ``tokenizer`` is the one that made the shards."""
        if tokenizer.digest != self.tokenizer.digest:
            raise ValueError(
                f"the shards in {self.folder} were made with the tokenizer {self.tokenizer.name!r} "
                f"({self.tokenizer.vocab_size} ids, sha256 {self.tokenizer.digest[:12]}); got {tokenizer.name!r} "
                f"({tokenizer.vocab_size} ids, {tokenizer.digest[:12]}). Set data.tokenizer={self.tokenizer.name}, "
                "or tokenize the text again."
            )

    def verify(self, rank: int = 0, ranks: int = 1, *, stamped: bool = False) -> None:
        """Read every byte of each ``ranks``-th shard from ``rank`` on; raise ValueError if one has changed.

        With ``stamped``, read only files that changed since they were verified.
        """
        with ThreadPoolExecutor(VERIFYING_THREADS) as pool:
            check = partial(Shard.check_digests, vocab_size=self.tokenizer.vocab_size, stamped=stamped)
            list(pool.map(check, self.shards[rank::ranks]))


def joined_digest(digests: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def is_shard_folder(source: str) -> bool:
    return (Path(source).expanduser() / MANIFEST).is_file()


@dataclass(frozen=True)
class ShardSlice:
    """Consecutive documents of a shard, ``begin`` to ``end`` − 1."""

    shard: Shard
    begin: int
    end: int
    cut: int = 0  # tokens at the end of the last document that are left out
    skip: int = 0  # tokens after the start token of the only document that are left out

    @property
    def first_token(self) -> int:
        return self.shard.document_start(self.begin)

    @property
    def tokens(self) -> int:
        return self.shard.document_start(self.end) - self.first_token - self.cut - self.skip

    @property
    def documents(self) -> int:
        return self.end - self.begin


class SplitShards:
    """The documents of a folder of shards, divided into training and held-out ones.

    Each shard holds out one run of consecutive documents from a random position, so that the held-out documents are a
    sample of the whole corpus, and finding them needs no list of documents. A run may include the end of a document
    that is trained on. ``layout`` is a version of ``ROW_LAYOUT``. Raise ValueError if there is too little text to
    divide, or the fraction is outside 0..1.
    """

    def __init__(self, folder: ShardFolder, validation_fraction: float, seed: int, layout: int = ROW_LAYOUT) -> None:
        self.seed, self.layout, self.digest = seed, layout, folder.digest
        held_out, training, self.divided = list[ShardSlice](), list[ShardSlice](), 0
        for run, tail in _held_out_runs(folder, validation_fraction, seed, layout):
            shard, end = run.shard, run.end
            held_out.append(run)
            training.append(ShardSlice(shard, 0, run.begin))
            if tail:
                end, self.divided = end + 1, self.divided + 1
                held_out.append(ShardSlice(shard, run.end, end, skip=ShardSlice(shard, run.end, end).tokens - tail))
                training.append(ShardSlice(shard, run.end, end, cut=tail - 1))
            training.append(ShardSlice(shard, end, shard.record.documents))
        self.held_out, self.training = ([part for part in parts if part.documents] for parts in (held_out, training))
        self.documents, self.held_out_documents = (sum(x.documents for x in p) for p in (self.training, self.held_out))
        self.tokens, self.held_out_tokens = (sum(x.tokens for x in p) for p in (self.training, self.held_out))

    def rows(self, sequence_length: int) -> ShardedRows:
        return ShardedRows(self, sequence_length)

    def held_out_corpus(self, max_tokens: int) -> TokenizedCorpus:
        """Return the first ``max_tokens`` tokens of the held-out documents in random order, in memory."""
        before = np.cumsum([0, *(run.documents for run in self.held_out)])
        order = Shuffle(self.held_out_documents, self.seed, HELD_OUT_ORDER)
        documents, count = list[NDArray[np.unsignedinteger]](), 0
        for place in map(order.__getitem__, range(self.held_out_documents)):
            which = int(np.searchsorted(before, place, side="right")) - 1
            run = self.held_out[which]
            document = run.begin + place - int(before[which])
            begin, end = run.shard.document_start(document), run.shard.document_start(document + 1)
            ids = run.shard.tokens
            documents.append(np.concatenate([ids[begin : begin + 1], ids[begin + 1 + run.skip : end]]))
            count += len(documents[-1])
            if count >= max_tokens:
                break
        return TokenizedCorpus.joined(documents).head(max_tokens)


def _held_out_runs(folder: ShardFolder, fraction: float, seed: int, layout: int) -> list[tuple[ShardSlice, int]]:
    """Return the held-out documents of every shard, possibly none, and the tokens held out of the next document's end.

    For every k, the first k shards of a random order together hold out the fraction of their tokens (up to layout 2: of
    their documents), rounded.
    """
    units = "documents" if layout < 3 else "tokens"
    sizes = np.array([getattr(shard.record, units) for shard in folder.shards])
    total = held_out_count(int(sizes.sum()), fraction, layout, 1 if layout < 3 else LEAST)
    order = permutation(len(folder.shards), seed, SPLIT_STREAM)
    upto = np.cumsum(sizes[order])
    # Integers, so that rounding never takes more from a shard than it has.
    counts = np.zeros(len(sizes), np.int64)
    counts[order] = np.diff((upto.astype(object) * total + sizes.sum() // 2) // sizes.sum(), prepend=0)
    if layout > 2 and 0 < counts.max() < LEAST:  # each share rounds to less than one token of text
        counts[sizes.argmax()] = LEAST
    places = np.random.PCG64((seed, HELD_OUT_PLACE)).random_raw(len(sizes)) % (sizes - counts + 1).astype(np.uint64)
    runs = []
    for shard, place, count in zip(folder.shards, places, counts.tolist(), strict=True):
        if layout < 3:
            runs.append((ShardSlice(shard, int(place), int(place) + count), 0))
            continue
        begin = int(shard.ends.searchsorted(place, side="right"))
        most = shard.document_start(begin) + count
        end = int(shard.ends.searchsorted(np.uint64(most), side="right"))
        left = most - shard.document_start(end)
        runs.append((ShardSlice(shard, begin, end), left if 2 * left > count and left >= LEAST else 0))
    return runs


class ShardedRows(OrderedRows):
    """Rows of the training documents of shards.

    The documents are concatenated in the order in which they were written, the same in every epoch, and cut into rows
    of ``sequence_length + 1`` tokens. The last token of a row is the first of the next. The last row of the corpus may
    be shorter: it is padded with a separate document without targets, so every epoch reads every token. Raise
    ValueError if the training documents are shorter than a row, or the length is out of range.
    """

    streams = (FIRST_EPOCH, 1)

    def __init__(self, split: SplitShards, sequence_length: int) -> None:
        whole = rows_in(split.tokens, sequence_length)
        self.rows_per_epoch = whole if split.layout == 1 else -(-(split.tokens - 1) // sequence_length)
        self.sequence_length, self.seed, self.documents = sequence_length, split.seed, split.documents
        self._ranges = split.training
        self._borders = np.cumsum([0, *(part.tokens for part in split.training)])
        self._first_documents = np.cumsum([0, *(part.documents for part in split.training)])

    def ordered_row(self, epoch: int, place: int) -> Row:
        begin, tokens, segments = place * self.sequence_length, [], []
        end = min(begin + self.sequence_length + 1, int(self._borders[-1]))
        which = int(np.searchsorted(self._borders, begin, side="right")) - 1
        while begin < end:
            part, stop = self._ranges[which], min(end, int(self._borders[which + 1]))
            first = part.first_token - int(self._borders[which])
            ids, numbers = _read_shard(part.shard, first + begin, first + stop)
            tokens.append(ids)
            segments.append(numbers + (int(self._first_documents[which]) - part.begin))
            begin, which = stop, which + 1
        return make_row(np.concatenate(tokens), np.concatenate(segments), self.sequence_length)


def _read_shard(shard: Shard, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return tokens ``begin`` to ``end`` − 1 of a shard, and the indices of their documents in the shard."""
    # With a value of another dtype, NumPy would copy the whole index.
    first = int(shard.ends.searchsorted(np.uint64(begin), side="right"))
    last = int(shard.ends.searchsorted(np.uint64(end - 1), side="right"))
    ends = np.minimum(np.array(shard.ends[first : last + 1], dtype=np.int64), end)
    counts = np.diff(ends, prepend=begin)
    return shard.tokens[begin:end].astype(np.int64), np.repeat(np.arange(first, last + 1), counts)
