"""Checkpoints of a run: when they are written and removed, and the models that are made of them.

A folder is written whole or not at all, verified by checksum, and read without pickle. One rank writes whole tensors to
``model.safetensors`` and ``optimizer.safetensors`` before training continues. Several ranks copy their shards to host
memory and write them to ``shards/`` while training continues (PyTorch's Distributed Checkpoint with safetensors files).
Any number of ranks can read either form.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from gecko.io.checkpoints import (
    MANIFEST,
    PREFIX,
    SHARDS,
    Entries,
    check_one_is_sound,
    checkpoint_path,
    checkpoint_step,
    find_fault,
    list_checkpoints,
    read_manifest,
    sha256,
    skipped,
)
from gecko.io.files import write_text
from gecko.io.model_folder import CONFIG, WEIGHTS
from gecko.models import LanguageModel, load_config, meta_model
from gecko.parallel.mesh import ALONE, Ranks
from gecko.train.metrics import DataRecord
from gecko.train.run import RECIPE, Run
from gecko.train.state import (
    TrainerState,
    host_stager,
    random_state,
    read_tensors,
    read_trainer_state,
    training_tensors,
    write_recipe,
    write_small_files,
    write_whole,
)
from gecko.train.step import CarriedState

_UNFINISHED = ".partial-"
_DIVERGED = "diverged-"
_NOT_FOR_SPACE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers that freeing disk space does not fix."""


def write_checkpoint(folder: Path, step: int, write_files: Callable[[Path], None]) -> Path:
    """Create the checkpoint ``folder/step-N`` from the files that ``write_files(temporary_folder)`` writes.

    At any time ``step-N`` is complete or absent: files and manifest are flushed to disk before the folder is renamed.
    Raise OSError with advice if they cannot be written.
    """
    try:
        partial = begin_checkpoint(folder, step)
        write_files(partial)
        return complete_checkpoint(partial, step, flushed_entries(partial, all_files(partial)))
    except (OSError, SafetensorError) as error:
        raise write_failure(folder, step, error) from error


def begin_checkpoint(folder: Path, step: int) -> Path:
    partial = folder / f"{_UNFINISHED}{PREFIX}{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    partial.mkdir()
    return partial


def complete_checkpoint(partial: Path, step: int, entries: Entries) -> Path:
    """Turn the folder ``partial`` into the checkpoint of ``step``; ``entries`` describes its files, already flushed."""
    folder = partial.parent
    target = checkpoint_path(folder, step)
    write_manifest(partial, entries)
    for path in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        _sync(path)
    if target.exists():
        target.rename(folder / f"{_UNFINISHED}replaced-{step:08d}")
    partial.rename(target)
    _sync(folder)
    remove_unfinished(folder)
    return target


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def flushed_entries(folder: Path, files: Iterable[Path]) -> Entries:
    """Flush ``files`` to disk and return their entries for the manifest of ``folder``."""
    entries: Entries = {}
    for path in files:
        _sync(path)
        name = path.relative_to(folder).as_posix()
        entries[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return entries


def remove_unfinished(folder: Path) -> None:
    """Delete what an interrupted save or removal left behind."""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def keep_newest(folder: Path, step: int, keep: int, keep_every: int | None = None) -> None:
    """Delete old checkpoints. Of those up to ``step``, keep the ``keep`` newest, the one with the lowest loss, and
    those at multiples of ``keep_every``.

    Later ones are deleted too: the run that writes ``step`` found them damaged. So are those before ``step`` that
    ``set_aside`` renamed.
    """
    written = list_checkpoints(folder)
    later = [path for path in written if checkpoint_step(path) > step]
    candidates = written[len(later) :]
    chosen = lowest_loss(candidates) if candidates else None
    earlier = [path for path in candidates[keep:] if path != chosen]
    old = [path for path in earlier if keep_every is None or checkpoint_step(path) % keep_every]
    diverged = [(path.name.removeprefix(_DIVERGED), path) for path in folder.glob(f"{_DIVERGED}*")]
    old += [path for of_step, path in diverged if of_step.isdigit() and int(of_step) < step]
    for path in [*later, *old]:
        # Rename first: an interrupted removal must not leave a checkpoint that looks complete.
        doomed = path.rename(folder / f"{_UNFINISHED}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)


def set_aside(folder: Path, step: int) -> str:
    """Rename the checkpoints of ``step`` and later, so that the run resumes from the newest sound one before them, and
    return how to go on after a session that ended in skipped steps."""
    written = list_checkpoints(folder)
    bad = [path for path in written if checkpoint_step(path) >= step]
    good = next((path for path in written[len(bad) :] if find_fault(path) is None), None)
    if good is None and bad:
        return (
            f"start again in another folder with output=: {bad[0].name} has the weights that these steps began with; "
            "there is no undamaged checkpoint before it."
        )
    if good is None:
        return "continue with --resume, which starts at the beginning: there is no checkpoint yet."
    on, aside = f"continue with --resume, which goes on from {good.name}", list[str]()
    for path in bad:
        kept = folder / path.name.replace(PREFIX, _DIVERGED)
        shutil.rmtree(kept, ignore_errors=True)  # of an earlier divergence at this step
        aside.append(str(path.rename(kept)))
    if not aside:
        return f"{on}; it is untouched."
    return f"{on}. The weights that these steps began with are in {', '.join(aside)}."


def latest_checkpoint(folder: Path, ranks: Ranks = ALONE) -> Path | None:
    """Return the newest undamaged checkpoint; None if the folder has none. Damaged ones are skipped with a warning.

    All ``ranks`` call it together, and get the same result or fail together: ValueError if all checkpoints are damaged,
    OSError if the first rank cannot list them.
    """
    candidates = ranks.main(lambda: list_checkpoints(folder))
    for path in candidates:
        faults = [fault for fault in ranks.gather(find_fault(path, ranks.rank, ranks.world)) if fault is not None]
        if not faults:
            return path
        if ranks.is_main:
            warnings.warn(skipped(path, faults[0]), stacklevel=2)
    ranks.run_or_abort_all(lambda: check_one_is_sound(folder, candidates))
    return None


def write_manifest(folder: Path, entries: Entries) -> None:
    write_text(folder / MANIFEST, json.dumps({"files": entries}, indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_failure(folder: Path, step: int, error: BaseException) -> OSError:
    """Remove the partial checkpoint of ``step``, and return the error to raise because it could not be written."""
    remove_unfinished(folder)
    previous = next((path.name for path in list_checkpoints(folder) if checkpoint_step(path) < step), None)
    kept = f"The previous one, {previous}, is intact." if previous else "There is no earlier one."
    advice = "Free some space (checkpoint.keep=1 keeps fewer)"
    if isinstance(error, OSError) and error.errno in _NOT_FOR_SPACE:
        advice = f"Make {folder} a folder that can be written to"
    else:
        with suppress(OSError):
            room = f"{shutil.disk_usage(folder).free / 1e6:.1f} MB are free there; if it takes more, "
            advice = room + advice.lower()
    return OSError(
        f"the checkpoint of step {step} could not be written to {folder}: {error}. {kept} {advice}, and continue with "
        "--resume."
    )


def write_model(checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint to ``folder`` as one ``model.safetensors``, by one process.

    ``folder`` may be the checkpoint itself: its manifest then lists the new file, unless it has one. OSError: writing
    fails.
    """
    if folder == checkpoint and WEIGHTS in read_manifest(checkpoint):
        return
    write_average([checkpoint], folder)
    if folder == checkpoint:
        # ``save`` wrote config.json again, which a newer version writes with more fields.
        written = flushed_entries(folder, [folder / WEIGHTS, folder / CONFIG])
        write_manifest(folder, {**read_manifest(folder), **written})


def check_consecutive(checkpoints: Sequence[Path]) -> None:
    """Raise ValueError if the run saved another checkpoint between these, newest first, which is gone."""
    for count, (later, earlier) in enumerate(pairwise(checkpoints), start=1):
        after, until = checkpoint_step(earlier), checkpoint_step(later)
        every = Run.load(later / RECIPE).checkpoint.every
        if (until - 1) // every > after // every:
            raise ValueError(
                f"the checkpoints to average must be consecutive; {later.name} and {earlier.name} are not, as one was "
                f"saved every {every} steps (older ones that are kept have the lowest loss, or are of "
                f"checkpoint.keep_every). Try --last {count}; a run keeps more with checkpoint.keep=N."
            )


def write_average(checkpoints: Sequence[Path], folder: Path) -> None:
    """Write the model whose weights are the means of those of ``checkpoints``, at least one, to ``folder``."""
    model = meta_model(load_config(checkpoints[0] / CONFIG))
    mean = dict[str, Tensor]()  # a weight that embedding and head share occurs once
    for count, checkpoint in enumerate(checkpoints, start=1):
        weights = {name: torch.empty_like(x, device="cpu").detach() for name, x in model.named_parameters()}
        read_tensors(checkpoint, dict(weights), alone=True)
        for name, weight in weights.items():
            mean.setdefault(name, weight).lerp_(weight, 1 / count)
    model.load_state_dict(mean, strict=False, assign=True)
    model.save(folder)


class CachedPlanner(DefaultSavePlanner):
    """Planner of one run's saves: the first gathers and divides the ranks' plans of who writes what; later ones compare
    their own part with it and exchange nothing if it is the same."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        # PyTorch caches plans by the class. Another run in this process has other tensors or other ranks.
        self._cached_plans_key = f"{type(self).__name__}-{id(self)}"

    def forget(self) -> None:
        """Remove the plan from PyTorch's caches, which outlive this planner."""
        for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
            getattr(self, f"_cached_{name}", {}).pop(self._cached_plans_key, None)


T = TypeVar("T")


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
            self._group = dist.new_group(backend="gloo", timeout=ranks.timeout)
            self._stager, self._planner = host_stager(ranks.mesh.device_type), CachedPlanner()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def use(self, run: Run) -> None:
        """Write ``run`` to its folder, and from now on to its checkpoints. All ranks call it."""
        self.run = run
        self.ranks.main(lambda: write_recipe(run))

    def save(self, model: LanguageModel, optimizer: torch.optim.Optimizer, position: TrainerState) -> None:
        """Save a checkpoint (one rank) or start to (several). Raise OSError if this or the previous save fails."""
        if self.ranks.world == 1:
            common = self.run, model, optimizer, position, self.data, self._carried
            write_checkpoint(self.folder, position.step, lambda folder: write_whole(folder, *common))
            return
        self.wait()
        try:
            partial = self.ranks.main(lambda: begin_checkpoint(self.folder, position.step))
        except OSError as error:
            raise write_failure(self.folder, position.step, error) from error
        random = random_state()
        tensors = training_tensors(model, optimizer) | ({} if self._carried is None else self._carried.tensors())
        # They are copied to the host memory of the last save before this returns.
        shards: Any = async_save(
            tensors, storage_writer=HuggingFaceStorageWriter(str(partial / SHARDS), save_distributed=True),
            planner=self._planner, process_group=self._group, async_stager=self._stager,
        )  # fmt: skip
        self._writing = self._executor.submit(self._complete, partial, shards, position, random)

    def wait(self) -> None:
        """Wait until all ranks have written the last save to disk. Raise OSError if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            while not wait([writing], timeout=1.0).done:
                self._beat()
            self.ranks.run_or_abort_all(writing.result)

    def drop_older(self, step: int) -> None:
        """Remove the checkpoints that ``run.checkpoint`` does not keep once ``step`` is saved. All ranks call it.

        Several ranks do so after the save in progress; if that fails, nothing is removed.
        """
        saving = self._writing

        def drop() -> None:
            if saving is not None:
                saving.result()
            if self.ranks.is_main:
                keep_newest(self.folder, step, self.run.checkpoint.keep, self.run.checkpoint.keep_every)

        if self.ranks.world == 1:
            drop()
        else:
            self._writing = self._executor.submit(drop)

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
            self._stager.close()
            self._planner.forget()

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


def lowest_loss(checkpoints: list[Path]) -> Path:
    """Return the checkpoint with the lowest mean training loss over its last steps; the newest of equal ones, which is
    the first.

    If the loss jumps to higher finite values that ``SpikeRule`` accepts after a while, the checkpoint before the jump
    is so kept until the loss is as low again.
    """

    def recent_loss(checkpoint: Path) -> float:
        try:
            losses = read_trainer_state(checkpoint).recent_losses
        except (ValueError, OSError):  # it is damaged
            return math.inf
        return statistics.fmean(losses) if losses else math.inf

    return min(checkpoints, key=recent_loss)
