"""Writes a run's checkpoints: on one rank before training goes on, on many ranks while it goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from gecko.baselines import LanguageModel
from gecko.parallel.mesh import Ranks
from gecko.train.checkpoint import (
    Entries,
    all_files,
    begin_checkpoint,
    complete_checkpoint,
    flushed_entries,
    keep_newest,
    write_checkpoint,
    write_failure,
)
from gecko.train.run import Run
from gecko.train.snapshot import (
    SHARDS,
    Position,
    checkpoints_folder,
    random_state,
    training_tensors,
    write_small_files,
    write_whole,
)

_SLICE = 1.0
"""Seconds between two beats."""


class Saver:
    """Context that saves checkpoints and drops those beyond ``run.checkpoint.keep``.

    Many ranks copy what they have to host memory and go on; a thread of each writes it. They talk on a
    process group of their own: the training's is busy. ``beat`` is called while ranks wait for the disk.
    """

    def __init__(self, run: Run, ranks: Ranks, beat: Callable[[], None]) -> None:
        self.run, self.ranks, self._beat = run, ranks, beat
        self.folder = checkpoints_folder(run)
        self._group = dist.new_group(backend="gloo", timeout=ranks.timeout) if ranks.world > 1 else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, model: LanguageModel, optimizer: torch.optim.Optimizer, position: Position) -> None:
        """Begin to save; OSError where this or the save before it fails."""
        if self.ranks.world == 1:
            write_checkpoint(
                self.folder, position.step, lambda folder: write_whole(folder, self.run, model, optimizer, position)
            )
            self._keep_newest(position.step)
            return
        self.wait()
        partial = self.ranks.share(self.ranks.agree(lambda: self._begin(position.step)))
        random = random_state()
        shards = self._write_shards(partial, training_tensors(model, optimizer))
        self._writing = self._executor.submit(self._complete, partial, shards, position, random)

    def wait(self) -> None:
        """Until the last save is on the disk, on all ranks; OSError where it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            while not wait([writing], _SLICE).done:
                self._beat()
            self.ranks.agree(writing.result)

    @property
    def failed(self) -> bool:
        """Whether ``wait`` would raise, as far as this rank knows by now."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After an error too: a thread without its process group does not end, and Python waits for it in the end. This
        # one needs nothing of the other ranks but theirs, which fail as soon as those are gone.
        if isinstance(error, Exception) and self._writing is not None and not self._writing.done():
            print(f"rank {self.ranks.rank} ends once its checkpoint is written: {error!r}", file=sys.stderr, flush=True)
        self._executor.shutdown()

    def _keep_newest(self, step: int) -> None:
        keep_newest(self.folder, step, self.run.checkpoint.keep, self.run.checkpoint.keep_every)

    def _begin(self, step: int) -> Path:
        """On the first rank: the folder it made for all. It may fail there alone, so nothing is exchanged in here."""
        if not self.ranks.first:
            return self.folder
        try:
            return begin_checkpoint(self.folder, step)
        except OSError as error:
            raise write_failure(self.folder, step, error) from error

    def _write_shards(self, partial: Path, tensors: dict[str, Tensor]) -> Future[Any]:
        writer = HuggingFaceStorageWriter(str(partial / SHARDS), save_distributed=True)
        written = async_save(tensors, storage_writer=writer, process_group=self._group)
        assert isinstance(written, Future)
        return written

    def _complete(self, partial: Path, shards: Future[Any], position: Position, random: Mapping[str, Tensor]) -> None:
        """In the thread: wait for all ranks' files; then the first rank makes them a checkpoint."""
        parts = self._gather(self._written(partial, shards))
        error = next((found for found, _ in parts if found is not None), None)
        if error is None:
            done = self._complete_first(partial, position, random, [part for _, part in parts])
            error = self._gather(done)[0]
        if error is not None:
            raise write_failure(self.folder, position.step, RuntimeError(error))

    def _written(self, partial: Path, shards: Future[Any]) -> tuple[str | None, Entries]:
        """What went wrong with this rank's files, or what the manifest says of them."""
        error = _failure(shards)
        if error is not None:
            return error, {}
        try:
            return None, flushed_entries(partial, (partial / SHARDS).glob(f"shard-{self.ranks.rank + 1:05d}-*"))
        except OSError as failure:
            return str(failure), {}

    def _complete_first(
        self, partial: Path, position: Position, random: Mapping[str, Tensor], parts: list[Entries]
    ) -> str | None:
        """On the first rank: the small files, the manifest and the name of a finished checkpoint; what went wrong."""
        if not self.ranks.first:
            return None
        try:
            write_small_files(partial, self.run, position, random)
            small = flushed_entries(partial, [path for path in all_files(partial) if path.parent == partial])
            complete_checkpoint(partial, position.step, {k: v for part in (*parts, small) for k, v in part.items()})
            self._keep_newest(position.step)
        except Exception as error:
            return str(error)
        return None

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks.world
        dist.all_gather_object(values, value, group=self._group)
        return values


def _failure(work: Future[Any]) -> str | None:
    """What went wrong in it, once it has ended. DCP's errors are no Exceptions, so no ``except`` would do."""
    error = work.exception()
    if isinstance(error, CheckpointException):
        return "; ".join(str(found) for found, _ in error.failures.values())
    return None if error is None else str(error)
