"""Parallel tokenization of a corpus into token shards, resumable after any interruption.

The corpus alone determines its tasks, one per shard. A task is done when the record of its shard exists, so the same
call continues after a stop, on one machine or on several.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from gecko.data.packing import batches
from gecko.data.shards import FORMAT, MANIFEST, SUFFIXES, Manifest, Shard, ShardRecord, TokenizerRecord
from gecko.data.sources import SourcePart, dataset_pieces, empty_source, find_sources
from gecko.data.text_stream import TokenBytes, token_bytes
from gecko.data.tokenizers import TokenIds, Tokenizer, load_tokenizer
from gecko.io.files import inner_name, parse_object, whole_file, write_text
from gecko.records import build, convert

PLAN = "tokenize.json"
SHARD_BYTES = (1 << 20, 1 << 30)
"""Bounds on the bytes of consecutive files that become one shard."""
_MANIFEST_SECONDS = 60.0
"""Age of a temporary manifest after which its process must be gone; writing takes far less."""
SHARDS = 64
"""Intended number of shards of a corpus, unless ``SHARD_BYTES`` forbids it; each core can work on another shard."""


@dataclass(frozen=True)
class Task:
    """One shard to write."""

    name: str
    source: str
    parts: tuple[SourcePart, ...]

    def __post_init__(self) -> None:
        inner_name(self.name)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class TokenizingPlan:
    """Complete description of a folder of shards before it is written."""

    folder: Path
    tokenizer: TokenizerRecord
    tasks: tuple[Task, ...]

    @classmethod
    def make(cls, sources: list[str], tokenizer: Tokenizer, folder: Path, *, field: str = "text") -> TokenizingPlan:
        """Find the corpus and divide it into tasks. Raise FileNotFoundError or ValueError if a source has no files, or
        the folder is inside a source."""
        _check_outside(folder, sources)
        parts = [
            (spec, part)
            for spec, wholes in find_sources(sources, field=field)
            for whole in wholes
            for part in dataset_pieces(_with_absolute_path(whole))
        ]
        tasks = tuple(
            Task(f"{number:05d}", group[0][0], tuple(part for _, part in group))
            for number, group in enumerate(_groups(parts))
        )
        return cls(folder, TokenizerRecord.of(tokenizer), tasks)

    @classmethod
    def load(cls, folder: Path) -> TokenizingPlan:
        """Read the plan that ``start`` wrote. ValueError names the file if it is damaged."""

        def parse(content: dict[str, Any]) -> TokenizingPlan:
            tokenizer = convert(content["tokenizer"], TokenizerRecord, "tokenizer")
            return cls(folder, tokenizer, convert(content["tasks"], tuple[Task, ...], "tasks"))

        return parse_object(folder / PLAN, "a plan of gecko tokenize", parse)

    def start(self) -> None:
        """Create the folder with this plan, or check that it already has it. Raise FileExistsError if the folder holds
        something else; nothing is overwritten."""
        path, content = self.folder / PLAN, self._content()
        if path.is_file():
            if path.read_bytes() != content.encode():
                raise FileExistsError(
                    f"{self.folder} holds shards of other sources, another tokenizer or files that have changed since, "
                    "and nothing there is overwritten. Choose another folder with --out."
                )
            return
        # A process that was killed while it wrote the plan leaves a temporary file.
        if self.folder.is_dir() and any(not entry.name.startswith(f".{PLAN}.") for entry in self.folder.iterdir()):
            raise FileExistsError(f"{self.folder} must be a new or an empty folder. Choose another one with --out.")
        write_text(path, content)

    def done(self) -> list[ShardRecord]:
        """Return the records of the complete shards in the order of tasks."""
        records = (read_record(self, task) for task in self.tasks)
        return [record for record in records if record is not None]

    def finish(self) -> Manifest | None:
        """Write the manifest and return it if all shards are complete, otherwise return None. Raise ValueError if a
        source has no text."""
        written = {path.name for path in self.folder.glob("*.json")}
        if any(f"{task.name}.json" not in written for task in self.tasks):
            # This check is fast: most of thousands of tasks return here without reading thousands of records.
            return None
        records = self.done()
        if len(records) < len(self.tasks):
            return None
        for spec in dict.fromkeys(task.source for task in self.tasks):
            if not any(record.documents for record in records if record.source == spec):
                raise empty_source(spec)
        manifest = Manifest(self.tokenizer, tuple(records))
        write_text(self.folder / MANIFEST, manifest.to_json())
        self._remove_leftovers()
        return manifest

    def withdraw(self) -> None:
        """Remove the plan after a failure, so that the corrected command can use the folder.

        The plan stays if a shard has documents, or if the folder holds other files, such as those that another process
        is writing.
        """
        names = (PLAN, *(task.name + suffix for task in self.tasks for suffix in (*SUFFIXES, ".json")))
        files = {self.folder / name for name in names}
        if set(self.folder.iterdir()) <= files and not any(record.documents for record in self.done()):
            for file in files:
                file.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Delete the temporary files of processes that were killed.

        All shards are complete, so no file of a shard is being written. Another process may be writing the manifest, so
        a temporary manifest is deleted only if it is old.
        """
        for leftover in self.folder.glob(".*.????????"):
            name = leftover.name[1:].rpartition(".")[0]
            if name == PLAN or name.partition(".")[0].isdigit() or (name == MANIFEST and _is_old(leftover)):
                leftover.unlink(missing_ok=True)

    def _content(self) -> str:
        tasks = [dataclasses.asdict(task) for task in self.tasks]
        return json.dumps({"format": FORMAT, "tokenizer": dataclasses.asdict(self.tokenizer), "tasks": tasks}, indent=1)


def _is_old(manifest: Path) -> bool:
    """Return whether the process that wrote a temporary manifest must be gone."""
    try:
        return time.time() - manifest.stat().st_mtime > _MANIFEST_SECONDS
    except FileNotFoundError:
        return False


def run_task(folder: Path, number: int) -> ShardRecord:
    """Write the shard of one task of the plan in ``folder``, unless it is complete.

    Raises:
        ValueError: the corpus cannot be read, or the corpus or the tokenizer has changed.
        OSError: writing failed; the shard has no record, so a later call writes it again.
    """
    plan = TokenizingPlan.load(folder)
    task = plan.tasks[number]
    if (record := read_record(plan, task)) is not None:
        return record
    with ThreadPoolExecutor(1) as encoders:
        return write_shard(plan, task, _same_tokenizer(plan.tokenizer), encoders)


def write_shard(plan: TokenizingPlan, task: Task, tokenizer: Tokenizer, encoders: Executor) -> ShardRecord:
    """Tokenize a task's documents into its shard's files, encoding in ``encoders``; errors as for ``run_task``."""
    record = ShardRecord(task.name, task.source, 0, 0, 0, ())
    shard = Shard(plan.folder, record, plan.tokenizer.dtype)
    with whole_file(shard.file(SUFFIXES[0])) as temporary:
        encoded = _encoded(batches(_documents(task)), tokenizer, encoders)
        lengths, text_bytes, digest = _write_tokens(temporary, encoded, plan.tokenizer, token_bytes(tokenizer))
    columns = [np.cumsum(lengths, dtype="<u8").tobytes(), np.array(text_bytes, "<u8").tobytes()]
    for suffix, column in zip(SUFFIXES[1:], columns, strict=True):
        with whole_file(shard.file(suffix)) as temporary:
            temporary.write_bytes(column)
    digests = (digest, *(sha256(column).hexdigest() for column in columns))
    record = dataclasses.replace(
        record, documents=len(lengths), tokens=sum(lengths), text_bytes=sum(text_bytes), sha256=digests
    )
    write_text(shard.file(".json"), json.dumps(dataclasses.asdict(record), indent=1))
    return record


def read_record(plan: TokenizingPlan, task: Task) -> ShardRecord | None:
    """Return the record of a task's shard; None if the shard is missing or incomplete."""
    try:
        record = parse_object(plan.folder / f"{task.name}.json", "the record of a shard", partial(build, ShardRecord))
        Shard(plan.folder, record, plan.tokenizer.dtype).check_sizes()
    except (FileNotFoundError, ValueError):
        return None
    return record


def _with_absolute_path(part: SourcePart) -> SourcePart:
    """Make a part's path absolute: on a cluster, tasks start in other working folders."""
    local = part.kind != "dataset" or Path(part.name).exists()
    return dataclasses.replace(part, name=os.path.abspath(part.name)) if local else part


def _check_outside(folder: Path, sources: list[str]) -> None:
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"the folder for the shards must lie outside the sources; {folder} is inside {source}, and shards "
                "there would be read as text the next time."
            )


def _groups(parts: list[tuple[str, SourcePart]]) -> Iterator[list[tuple[str, SourcePart]]]:
    """Group consecutive files of a source into shards; a piece of a data set is always a separate shard."""
    least, most = SHARD_BYTES
    target = min(max(sum(part.size for _, part in parts) // SHARDS, least), most)
    group: list[tuple[str, SourcePart]] = []
    size = 0
    for spec, part in parts:
        if group and (size + part.size > target or spec != group[0][0] or part.kind == "dataset"):
            yield group
            group, size = [], 0
        group.append((spec, part))
        size += part.size
    yield group


def _write_tokens(
    path: Path, encoded: Iterator[list[TokenIds]], tokenizer: TokenizerRecord, sizes: TokenBytes
) -> tuple[array, array, str]:
    """Write the ids; return lengths and text bytes of the documents, and the SHA-256 of the file."""
    dtype = tokenizer.dtype
    start = np.array([tokenizer.document_start], dtype).tobytes()
    end = np.array([tokenizer.document_end], dtype).tobytes()
    lengths, text_bytes, digest = array("q"), array("q"), sha256()
    with path.open("wb") as file:
        for batch in encoded:
            block = bytearray()
            for ids in batch:
                if len(ids):
                    block += start + ids.astype(dtype).tobytes() + end
                    lengths.append(len(ids) + 2)
                    text_bytes.append(sizes.of_text(ids))
            digest.update(block)
            file.write(block)
    return lengths, text_bytes, digest.hexdigest()


def _documents(task: Task) -> Iterator[str]:
    for part in task.parts:
        try:
            _check_size(part)
            yield from part.read()
        except OSError as error:
            # An OSError would be reported as an error of the disk that the shard is written to.
            raise ValueError(
                f"{part.name} must be readable while it is tokenized; got: {error.strerror or error}. Make it so and "
                "run the same command again: shards that are there stay."
            ) from error


def _check_size(part: SourcePart) -> None:
    size = Path(part.name).stat().st_size if part.size else 0
    if size != part.size:
        raise ValueError(
            f"{part.name} must not change while it is tokenized; it had {part.size:,} bytes and has {size:,} now. "
            "Tokenize it into a new folder."
        )


def _encoded(texts: Iterator[list[str]], tokenizer: Tokenizer, encoders: Executor) -> Iterator[list[TokenIds]]:
    """Yield the ids of batches; the next batch is encoded while the caller works on this one."""
    waiting = None
    for batch in texts:
        submitted = encoders.submit(tokenizer.encode_batch, batch)
        if waiting is not None:
            yield waiting.result()
        waiting = submitted
    if waiting is not None:
        yield waiting.result()


@lru_cache(maxsize=1)
def _same_tokenizer(record: TokenizerRecord) -> Tokenizer:
    tokenizer = load_tokenizer(record.name)
    if tokenizer.digest != record.digest:
        raise ValueError(
            f"the tokenizer {record.name!r} must be the one that the folder was started with; its file has changed. "
            "Restore it, or tokenize into a new folder."
        )
    return tokenizer
