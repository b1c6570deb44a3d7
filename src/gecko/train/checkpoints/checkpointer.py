"""When a run's checkpoints are written and removed.

One rank writes whole tensors to ``model.safetensors`` and ``optimizer.safetensors`` before training continues. Several
ranks copy their shards to host memory and write them to ``shards/`` while training continues (PyTorch's Distributed
Checkpoint with safetensors files). Any number of ranks can read either form, and nothing is pickled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from gecko.io.checkpoints import SHARDS, Entries
from gecko.models import LanguageModel
from gecko.parallel.mesh import Ranks
from gecko.train.checkpoints.content import (
    TrainerState,
    lowest_loss,
    random_state,
    training_tensors,
    write_recipe,
    write_small_files,
    write_whole,
)
from gecko.train.checkpoints.folders import (
    all_files,
    begin_checkpoint,
    complete_checkpoint,
    flushed_entries,
    keep_newest,
    write_checkpoint,
    write_failure,
)
from gecko.train.metrics import DataRecord
from gecko.train.run import Run
from gecko.train.step import CarriedState


def host_stager(device: str) -> DefaultStager:
    """Return a stager, which copies tensors of a kind of device to host memory that it keeps for the next copy.

    For CUDA the memory is pinned, because a GPU copies to it several times as fast. The host waits for the copy: the
    next step of the optimizer changes the tensors.
    """
    on_gpu = device == "cuda" and torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
    )


class CachedPlanner(DefaultSavePlanner):
    """Planner of one run's saves, which have one plan: who writes which part of which tensor.

    The first save gathers and divides the ranks' plans. Later ones compare their own part with it and exchange nothing
    if it is the same.
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        # PyTorch caches plans by the class. Another run in this process has other tensors or other ranks.
        self._cached_plans_key = f"{type(self).__name__}-{id(self)}"

    def forget(self) -> None:
        """Remove the plan from PyTorch's caches, which outlive this planner."""
        for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
            getattr(self, f"_cached_{name}", {}).pop(self._cached_plans_key, None)


class ShardWriter:
    """Writes the shards of all ranks of ``group``, one save at a time."""

    def __init__(self, device: str, group: dist.ProcessGroup) -> None:
        self._group, self._stager, self._planner = group, host_stager(device), CachedPlanner()

    def start(self, checkpoint: Path, tensors: dict[str, Tensor]) -> Future[Any]:
        """Copy ``tensors`` to host memory and start to write them to ``checkpoint``. All ranks call it together.

        The memory is that of the last save, which must have ended.
        """
        writer = HuggingFaceStorageWriter(str(checkpoint / SHARDS), save_distributed=True)
        written = async_save(
            tensors, storage_writer=writer, planner=self._planner, process_group=self._group, async_stager=self._stager
        )
        assert isinstance(written, Future)
        return written

    def close(self) -> None:
        """Free the memory; the last save must have ended."""
        self._stager.close()
        self._planner.forget()


T = TypeVar("T")

_SLICE = 1.0
"""Seconds between two calls of ``beat``."""


class Checkpointer:
    """Context that saves checkpoints, and removes old ones when ``drop_older`` is called.

    With several ranks, each rank copies its shards to host memory, and a thread writes them while training continues.
    The threads use a process group of their own, because training uses the default one at the same time. ``beat`` is
    called while a rank waits for the disk. Every checkpoint contains ``data`` and the states of ``carried``.
    """

    def __init__(
        self, run: Run, ranks: Ranks, beat: Callable[[], None], data: DataRecord, carried: CarriedState | None = None
    ) -> None:
        self.run, self.ranks, self._beat, self.data, self._carried = run, ranks, beat, data, carried
        self.folder = run.checkpoints_folder
        self._group: dist.ProcessGroup | None = None
        if ranks.mesh is not None:
            group = dist.new_group(backend="gloo", timeout=ranks.timeout)
            self._group, self._shards = group, ShardWriter(ranks.mesh.device_type, group)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def use(self, run: Run) -> None:
        """Write ``run`` to its folder, and from now on to its checkpoints. All ranks call it."""
        self.run = run
        self.ranks.main(lambda: write_recipe(run))

    def save(self, model: LanguageModel, optimizer: torch.optim.Optimizer, position: TrainerState) -> None:
        """Save a checkpoint (one rank) or start to (several). Raise OSError if this or the previous save fails."""
        if self.ranks.world == 1:
            write_checkpoint(
                self.folder,
                position.step,
                lambda folder: write_whole(folder, self.run, model, optimizer, position, self.data, self._carried),
            )
            return
        self.wait()
        try:
            partial = self.ranks.main(lambda: begin_checkpoint(self.folder, position.step))
        except OSError as error:
            raise write_failure(self.folder, position.step, error) from error
        random = random_state()
        lanes = {} if self._carried is None else self._carried.tensors()
        shards = self._shards.start(partial, {**training_tensors(model, optimizer), **lanes})
        self._writing = self._executor.submit(self._complete, partial, shards, position, random)

    def wait(self) -> None:
        """Wait until all ranks have written the last save to disk. Raise OSError if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            while not wait([writing], _SLICE).done:
                self._beat()
            self.ranks.run_or_abort_all(writing.result)

    def drop_older(self, step: int) -> None:
        """Remove the checkpoints that ``run.checkpoint`` does not keep once ``step`` is saved. All ranks call it.

        Several ranks do so after the save in progress; if that fails, nothing is removed.
        """
        if self.ranks.world == 1:
            self._keep_newest(step)
            return
        self._writing = self._executor.submit(self._drop_after, self._writing, step)

    def _drop_after(self, saving: Future[None] | None, step: int) -> None:
        if saving is not None:
            saving.result()
        self._keep_newest(step)

    @property
    def failed(self) -> bool:
        """Whether the last save has failed, as far as this rank knows; ``wait`` then raises the error."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        # Wait for the thread, also after an error: without its process group it would never end, and Python joins it at
        # exit. It waits for the threads of other ranks only, and their operations fail when those ranks have exited.
        if isinstance(error, Exception) and self._writing is not None and not self._writing.done():
            print(f"rank {self.ranks.rank} ends once its checkpoint is written: {error!r}", file=sys.stderr, flush=True)
        self._executor.shutdown()
        if self._group is not None:
            self._shards.close()

    def _keep_newest(self, step: int) -> None:
        if self.ranks.is_main:
            settings = self.run.checkpoint
            keep_newest(self.folder, step, settings.keep, settings.keep_every, lowest_loss)

    def _complete(
        self, partial: Path, shards: Future[Any], position: TrainerState, random: Mapping[str, Tensor]
    ) -> None:
        """Wait, in the thread, for the files of all ranks; then the first rank completes the checkpoint."""

        def written() -> Entries:
            shards.result()
            return flushed_entries(partial, (partial / SHARDS).glob(f"shard-{self.ranks.rank + 1:05d}-*"))

        parts = self._on_all_ranks(position.step, written)

        def completed() -> None:
            if self.ranks.is_main:
                write_small_files(partial, self.run, position, random, self.data)
                small = flushed_entries(partial, [path for path in all_files(partial) if path.parent == partial])
                complete_checkpoint(partial, position.step, {k: v for part in (*parts, small) for k, v in part.items()})

        self._on_all_ranks(position.step, completed)

    def _on_all_ranks(self, step: int, work: Callable[[], T]) -> list[T]:
        """Return the results of ``work()`` on all ranks. If it fails on one, all raise OSError."""
        found: tuple[T | None, str | None]
        try:
            found = work(), None
        except CheckpointException as failure:  # not a subclass of Exception
            found = None, "; ".join(str(error) for error, _ in failure.failures.values())
        except Exception as error:
            found = None, str(error)
        results: list[Any] = [None] * self.ranks.world
        dist.all_gather_object(results, found, group=self._group)
        message = next((message for _, message in results if message is not None), None)
        if message is not None:
            raise write_failure(self.folder, step, RuntimeError(message))
        return [result for result, _ in results]
