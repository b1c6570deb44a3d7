"""Parallel tokenization of a corpus into token shards, resumable after any interruption.

The corpus alone determines its tasks, one per shard. A task is done when the record of its shard exists, so the same
call continues after a stop, on this machine or, with datatrove, on a Slurm or Ray cluster.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gecko.data.packing import batches, joined_ids
from gecko.data.shards import FORMAT, MANIFEST, SUFFIXES, Manifest, Shard, ShardRecord, TokenizerRecord
from gecko.data.sources import SourcePart, empty_source, find_sources
from gecko.data.text_stream import token_bytes
from gecko.data.tokenizers import TokenIds, Tokenizer, load_tokenizer
from gecko.io.files import inner_name, parse_object, whole_file, write_text
from gecko.records import build, convert
from gecko.runtime.process import require

PLAN = "tokenize.json"
SHARD_BYTES = (1 << 20, 1 << 30)  # bounds on the bytes of consecutive files that become one shard
_MANIFEST_SECONDS = 60.0  # age of a temporary manifest after which its process must be gone; writing takes far less
SHARDS = 64
"""Intended number of shards of a corpus, unless ``SHARD_BYTES`` forbids it; each core can work on another shard."""
MOST_THREADS = 8
"""Largest number of workers that run as threads: the tokenizer releases the GIL, and threads start at once."""
RUN_FOLDER, SLURM_JOB = "executor", "slurm_job"
"""Folder of datatrove's logs, inside that of the shards, and its file with the Slurm job that was submitted last."""


@dataclass(frozen=True)
class Task:
    """One shard to write."""

    name: str
    source: str
    parts: tuple[SourcePart, ...]

    def __post_init__(self) -> None:
        inner_name(self.name)


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
        for source in sources:
            path = Path(source).expanduser()
            if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
                raise ValueError(
                    f"the folder for the shards must lie outside the sources; {folder} is inside {source}, and shards "
                    "there would be read as text the next time."
                )
        parts: list[tuple[str, SourcePart]] = []
        for spec, wholes in find_sources(sources, field=field):
            for part in wholes:
                if part.kind != "dataset" or Path(part.name).exists():
                    # On a cluster, tasks start in other working folders.
                    part = dataclasses.replace(part, name=os.path.abspath(part.name))
                parts += [(spec, piece) for piece in part.divided()]
        groups = enumerate(_groups(parts))
        tasks = (Task(f"{number:05d}", group[0][0], tuple(part for _, part in group)) for number, group in groups)
        return cls(folder, TokenizerRecord.of(tokenizer), tuple(tasks))

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
        path, fields = self.folder / PLAN, dataclasses.asdict(self)
        del fields["folder"]
        content = json.dumps({"format": FORMAT, **fields}, indent=1)
        if path.is_file():
            files = (Path(part.name) for task in self.tasks for part in task.parts if part.kind != "dataset")
            newer = any(file.stat().st_mtime > path.stat().st_mtime for file in files)
            if newer or path.read_bytes() != content.encode():
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
        return [record for task in self.tasks if (record := read_record(self, task)) is not None]

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
        """Remove the plan's file after a failure, so that the corrected command can use the folder. The file stays if
        a shard has documents, or if the folder holds other files, such as those that another process is writing."""
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
            with suppress(FileNotFoundError):
                old = name == MANIFEST and time.time() - leftover.stat().st_mtime > _MANIFEST_SECONDS
                if old or name == PLAN or name.partition(".")[0].isdigit():
                    leftover.unlink()


def _groups(parts: list[tuple[str, SourcePart]]) -> Iterator[list[tuple[str, SourcePart]]]:
    """Group consecutive files of a source into shards; a piece of a data set is always a separate shard."""
    least, most = SHARD_BYTES
    target = min(max(sum(part.size for _, part in parts) // SHARDS, least), most)
    group, size = list[tuple[str, SourcePart]](), 0
    for spec, part in parts:
        if group and (size + part.size > target or spec != group[0][0] or part.kind == "dataset"):
            yield group
            group, size = [], 0
        group.append((spec, part))
        size += part.size
    yield group


def read_record(plan: TokenizingPlan, task: Task) -> ShardRecord | None:
    """Return the record of a task's shard; None if the shard is missing or incomplete."""
    try:
        record = parse_object(plan.folder / f"{task.name}.json", "the record of a shard", partial(build, ShardRecord))
        Shard(plan.folder, record, plan.tokenizer.dtype).check_sizes()
    except (FileNotFoundError, ValueError):
        return None
    return record


def run_task(folder: Path, number: int) -> ShardRecord:
    """Write the shard of one task of the plan in ``folder``, unless it is complete.

    Raise ValueError if the corpus cannot be read, or the corpus or the tokenizer has changed, OSError if writing
    failed: the shard has no record then, so a later call writes it again.
    """
    plan = TokenizingPlan.load(folder)
    task = plan.tasks[number]
    if (record := read_record(plan, task)) is not None:
        return record
    with ThreadPoolExecutor(1) as encoders:
        return write_shard(plan, task, _same_tokenizer(plan.tokenizer), encoders)


@lru_cache(maxsize=1)
def _same_tokenizer(record: TokenizerRecord) -> Tokenizer:
    tokenizer = load_tokenizer(record.name)
    if tokenizer.digest != record.digest:
        raise ValueError(
            f"the tokenizer {record.name!r} must be the one that the folder was started with; its file has changed. "
            "Restore it, or tokenize into a new folder."
        )
    return tokenizer


def write_shard(plan: TokenizingPlan, task: Task, tokenizer: Tokenizer, encoders: Executor) -> ShardRecord:
    """Tokenize a task's documents into its shard's files, encoding in ``encoders``; errors as for ``run_task``."""
    record = ShardRecord(task.name, task.source, 0, 0, 0, ())
    shard = Shard(plan.folder, record, plan.tokenizer.dtype)
    lengths, text_bytes, digest, sizes = array("q"), array("q"), sha256(), token_bytes(tokenizer)
    with whole_file(shard.file(SUFFIXES[0])) as temporary, temporary.open("wb") as file:
        for batch in _encoded(batches(_documents(task)), tokenizer, encoders):
            block, of_documents = joined_ids(batch, tokenizer)
            lengths.extend(of_documents)
            text_bytes.extend(sizes.of_text(ids) for ids in batch if len(ids))
            digest.update(block)
            file.write(block)
    columns = [np.cumsum(lengths, dtype="<u8").tobytes(), np.array(text_bytes, "<u8").tobytes()]
    for suffix, column in zip(SUFFIXES[1:], columns, strict=True):
        with whole_file(shard.file(suffix)) as temporary:
            temporary.write_bytes(column)
    digests = (digest.hexdigest(), *(sha256(column).hexdigest() for column in columns))
    record = dataclasses.replace(
        record, documents=len(lengths), tokens=sum(lengths), text_bytes=sum(text_bytes), sha256=digests
    )
    write_text(shard.file(".json"), json.dumps(dataclasses.asdict(record), indent=1))
    return record


def _documents(task: Task) -> Iterator[str]:
    for part in task.parts:
        try:
            size = Path(part.name).stat().st_size if part.size else 0
            if size != part.size:
                raise ValueError(
                    f"{part.name} must not change while it is tokenized; it had {part.size:,} bytes and has {size:,} "
                    "now. Tokenize it into a new folder."
                )
            yield from part.read()
        except OSError as error:
            # An OSError would be reported as an error of the disk that the shard is written to.
            raise ValueError(
                f"{part.name} must be readable while it is tokenized; got: {error.strerror or error}. Make it so and "
                "run the same command again: shards that are there stay."
            ) from error


def _encoded(texts: Iterator[list[str]], tokenizer: Tokenizer, encoders: Executor) -> Iterator[list[TokenIds]]:
    """Yield the ids of batches; the next batch is encoded while the caller works on this one."""
    submitted = (encoders.submit(tokenizer.encode_batch, batch) for batch in texts)
    for waiting, _ in pairwise(chain(submitted, [None])):
        assert waiting is not None
        yield waiting.result()


def run_here(plan: TokenizingPlan, tokenizer: Tokenizer, workers: int) -> Iterator[ShardRecord]:
    """Write the missing shards with the plan's tokenizer, and yield the record of each when it is complete.

    At most ``workers`` shards are encoded at a time. With threads, the same number of others is written at that time.
    Errors are those of ``run_task``, after all started shards have ended.
    """
    waiting = [number for number, task in enumerate(plan.tasks) if read_record(plan, task) is None]
    # The largest shards first, so that no large shard is still running at the end.
    waiting.sort(key=lambda number: -sum(part.size for part in plan.tasks[number].parts))
    with _pool(plan, tokenizer, max(1, min(workers, len(waiting)))) as submit:
        futures = [submit(number) for number in waiting]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise OSError(
                None, "a process that wrote a shard was killed, perhaps for lack of memory. Run the command again with "
                "fewer --workers; complete shards stay."
            ) from error  # fmt: skip
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def _pool(plan: TokenizingPlan, tokenizer: Tokenizer, workers: int) -> Iterator[Callable[[int], Future[ShardRecord]]]:
    """Yield a function that submits a task; the block waits for all submitted tasks."""
    if workers > MOST_THREADS:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(workers, context, initializer=_set_up_worker) as pool:
            yield lambda number: pool.submit(run_task, plan.folder, number)
        return
    # Completing a shard waits for the disk several times. Meanwhile another shard is encoded.
    with ThreadPoolExecutor(workers) as encoders, ThreadPoolExecutor(2 * workers) as writers:
        yield lambda number: writers.submit(write_shard, plan, plan.tasks[number], tokenizer, encoders)


def _set_up_worker() -> None:
    """Use one thread, because the processes share the cores, and end with the parent process."""
    # The tokenizers library reads this variable when it first works in parallel.
    os.environ["RAYON_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:  # otherwise the process waits forever, as it holds both ends of the pool's queue
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def run_share(folder: Path, data: Any, rank: int, world_size: int) -> Iterator[Any]:
    """Run the plan in ``folder`` as a step of a datatrove pipeline: rank r of n writes tasks r, r + n, … The rank that
    writes the last shard also writes the manifest."""
    plan = TokenizingPlan.load(folder)
    for number in range(rank, len(plan.tasks), world_size):
        run_task(folder, number)
    plan.finish()
    return iter(())


def run_on_slurm(plan: TokenizingPlan, workers: int, *, partition: str, hours: int) -> str:
    """Submit the plan as an array of Slurm jobs of one core each, ``workers`` at a time; return the job's number. Raise
    ValueError if this machine cannot submit jobs."""
    if shutil.which("sbatch") is None:
        raise ValueError("Slurm jobs need the command sbatch, which this machine does not have; try a login node.")
    executor = _with_datatrove(
        "SlurmPipelineExecutor", "cluster", plan, workers, partition=partition, time=f"{hours}:00:00",
        job_name="gecko-tokenize", qos="",
        # datatrove's launcher is in the folder of this Python's commands.
        env_command=f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
    )  # fmt: skip
    job = str(executor.job_id)
    # datatrove submits several arrays if there are more tasks than one may have. This is the last array, which starts
    # after the others.
    (plan.folder / RUN_FOLDER / SLURM_JOB).write_text(job, encoding="utf-8")
    return job


def unfinished_slurm_job(plan: TokenizingPlan) -> str | None:
    """Return the job that ``run_on_slurm`` submitted last if Slurm still has it; None also without Slurm."""
    record = plan.folder / RUN_FOLDER / SLURM_JOB
    if not record.is_file() or shutil.which("squeue") is None:
        return None
    job = record.read_text(encoding="utf-8", errors="replace")
    queue = subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=False)
    # For a job that Slurm no longer knows, squeue fails without output.
    return job if queue.stdout.strip() else None


def run_on_ray(plan: TokenizingPlan, workers: int) -> None:
    """Run the plan on the Ray cluster of this machine, ``workers`` tasks at a time, and wait for its end. Raise OSError
    if some shards could not be written; the others are complete."""
    require("ray", "ray")
    _with_datatrove("RayPipelineExecutor", "ray", plan, workers)
    # The executor retries a failed task, and then only logs the failure.
    if missing := len(plan.tasks) - len(plan.done()):
        raise OSError(
            None, f"{missing} of {len(plan.tasks)} shards could not be written; {plan.folder / RUN_FOLDER / 'logs'} "
            "has the reason. Correct it and run the command again: complete shards stay."
        )  # fmt: skip


def _with_datatrove(executor: str, extra: str, plan: TokenizingPlan, workers: int, **more: Any) -> Any:
    """Run one of datatrove's executors on the plan, and return it."""
    folder = plan.folder.resolve()
    # The shards say which tasks are done: datatrove would not notice a deleted shard.
    found = getattr(require("datatrove.executor", extra), executor)(
        [partial(run_share, folder)], tasks=len(plan.tasks), workers=workers, logging_dir=str(folder / RUN_FOLDER),
        skip_completed=False, **more,
    )  # fmt: skip
    found.run()
    return found
