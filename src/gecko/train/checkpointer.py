"""Content of a run's checkpoints, and when they are written and removed.

One rank writes whole tensors to ``model.safetensors`` and ``optimizer.safetensors`` before training continues. Several
ranks copy their shards to host memory and write them to ``shards/`` while training continues (PyTorch's Distributed
Checkpoint with safetensors files). Any number of ranks can read either form, and nothing is pickled.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import async_save

from gecko.data.tokenizers import copy_tokenizer, holds_tokenizer
from gecko.io.json_files import parse_object
from gecko.io.model_folder import CONFIG, WEIGHTS, stored_prefix
from gecko.models.registry import LanguageModel, load_config, meta_model
from gecko.parallel.mesh import Ranks
from gecko.train.checkpoint import (
    Entries,
    GoingOn,
    all_files,
    begin_checkpoint,
    complete_checkpoint,
    flushed_entries,
    keep_newest,
    read_manifest,
    set_aside,
    write_checkpoint,
    write_failure,
    write_manifest,
)
from gecko.train.metrics import DataRecord
from gecko.train.overrides import build
from gecko.train.run import Run
from gecko.train.step import named_parameters, optimizer_tensors

RECIPE, SHARDS = "recipe.json", "shards"
_OPTIMIZER, _RANDOM, _TRAINER = "optimizer.safetensors", "random.safetensors", "trainer.json"


@dataclass(frozen=True)
class TrainerState:
    """Where a run is."""

    step: int = 0
    """Finished steps, the skipped ones too; also the index of the next batch."""
    seconds: float = 0.0
    """Time spent so far, over all sessions."""
    skipped: int = 0
    """Steps skipped, ..."""
    consecutive_skips: int = 0
    """... and those of them since the last step that was taken."""
    recent_losses: tuple[float, ...] = ()
    """Of the last steps that were finite, as the rule for spikes looks back on them, ..."""
    recent_grad_norms: tuple[float, ...] = ()
    """... and their gradient norms."""


def checkpoints_folder(run: Run) -> Path:
    return run.folder / "checkpoints"


def tokenizer_folder(run: Run) -> Path:
    """A copy of the tokenizer's files, which every checkpoint gets: wherever one goes, they go along."""
    return run.folder / "tokenizer"


def write_whole(
    folder: Path,
    run: Run,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    position: TrainerState,
    data: DataRecord,
) -> None:
    """A checkpoint's files, by one rank that has all of the model."""
    model.save(folder)
    save_file(optimizer_tensors(model, optimizer), folder / _OPTIMIZER)
    write_small_files(folder, run, position, random_state(), data)


def write_small_files(
    folder: Path, run: Run, position: TrainerState, random: Mapping[str, Tensor], data: DataRecord
) -> None:
    """What is the same for all ranks: random state, position, record of the data, config, recipe and tokenizer."""
    data.save(folder)
    save_file(dict(random), folder / _RANDOM)
    (folder / _TRAINER).write_text(json.dumps(asdict(position), indent=2) + "\n", encoding="utf-8")
    run.model.save(folder / CONFIG)
    run.save(folder / RECIPE)
    if holds_tokenizer(tokenizer_folder(run)):
        copy_tokenizer(str(tokenizer_folder(run)), folder)


def training_tensors(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters by name and optimizer state by ``parameter name/state name``, sharded where the model is."""
    parameters = {name: parameter.detach() for name, parameter in named_parameters(model)}
    return {**parameters, **optimizer_tensors(model, optimizer)}


def restore_snapshot(path: Path, model: LanguageModel, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Load the model, optimizer and random state of a verified checkpoint, all ranks together."""
    read_tensors(path, training_tensors(model, optimizer))
    _set_random_state(path / _RANDOM)
    return read_trainer_state(path)


def read_trainer_state(path: Path) -> TrainerState:
    """Return the trainer state of a checkpoint. ValueError that names its file if it is damaged."""
    return parse_object(path / _TRAINER, "a trainer's state", partial(build, TrainerState))


def read_tensors(path: Path, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Fill ``tensors``, sharded in any way, from a checkpoint; all ranks together, or one ``alone``.

    ValueError where it lacks one of them or has another shape.
    """
    shards = path / SHARDS
    if shards.is_dir():
        path = shards
    else:  # names of optimizer state, which have no prefix, contain a slash
        prefix = stored_prefix(path)
        tensors = {name if "/" in name else prefix + name: tensor for name, tensor in tensors.items()}
    reader = HuggingFaceStorageReader(str(path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        try:
            load_distributed(tensors, storage_reader=reader, no_dist=alone)
        except CheckpointException as failure:
            cause = next(iter(failure.failures.values()), (failure, None))[0]
            raise ValueError(f"{path} must hold the tensors of this model and its optimizer; {cause}") from failure


def write_model(checkpoint: Path, folder: Path) -> None:
    """Write, alone, the model of a checkpoint to ``folder`` as one ``model.safetensors``, which
    ``gecko.models.registry.load_any`` reads.

    Into the checkpoint itself too, unless it has one: its manifest then lists the new file. OSError where the disk is
    full.
    """
    if folder == checkpoint and WEIGHTS in read_manifest(checkpoint):
        return
    model = meta_model(load_config(checkpoint / CONFIG))
    # Not by ``to_empty``, which makes two weights of one that embedding and head share.
    weights = {name: torch.empty_like(weight, device="cpu") for name, weight in model.named_parameters()}
    read_tensors(checkpoint, {name: weight.detach() for name, weight in weights.items()}, alone=True)
    model.load_state_dict(weights, strict=False, assign=True)
    model.save(folder)
    if folder == checkpoint:
        # Its config is what it was, byte for byte: killed here, the checkpoint is as sound as before.
        write_manifest(folder, {**read_manifest(folder), **flushed_entries(folder, [folder / WEIGHTS])})


def random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(path: Path) -> None:
    state = load_file(path)
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def lowest_loss(checkpoints: list[Path]) -> Path:
    """Return the checkpoint with the lowest mean training loss over its last steps; the newest of equal ones.

    A divergence to finite losses that the rule for spikes comes to accept raises this mean, so the checkpoint before
    it stays until the loss is as low again.

    Args:
        checkpoints: newest first, at least one.
    """
    return min(checkpoints, key=_recent_loss)


def _recent_loss(checkpoint: Path) -> float:
    """Infinite if the checkpoint has no losses, or is damaged."""
    try:
        losses = read_trainer_state(checkpoint).recent_losses
    except (ValueError, OSError):
        return math.inf
    return statistics.fmean(losses) if losses else math.inf


_SLICE = 1.0
"""Seconds between two beats."""


class Checkpointer:
    """Context that saves checkpoints, and drops those beyond ``run.checkpoint.keep`` when it is told to.

    Many ranks copy what they have to host memory and go on; a thread of each writes it. They talk on a
    process group of their own: the training's is busy. ``beat`` is called while ranks wait for the disk. Every
    checkpoint gets ``data``.
    """

    def __init__(self, run: Run, ranks: Ranks, beat: Callable[[], None], data: DataRecord) -> None:
        self.run, self.ranks, self._beat, self.data = run, ranks, beat, data
        self.folder = checkpoints_folder(run)
        self._group = dist.new_group(backend="gloo", timeout=ranks.timeout) if ranks.world > 1 else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, model: LanguageModel, optimizer: torch.optim.Optimizer, position: TrainerState) -> None:
        """Begin to save; OSError where this or the save before it fails."""
        if self.ranks.world == 1:
            write_checkpoint(
                self.folder,
                position.step,
                lambda folder: write_whole(folder, self.run, model, optimizer, position, self.data),
            )
            return
        self.wait()
        partial = self.ranks.broadcast(self.ranks.run_or_abort_all(lambda: self._begin(position.step)))
        random = random_state()
        shards = self._write_shards(partial, training_tensors(model, optimizer))
        self._writing = self._executor.submit(self._complete, partial, shards, position, random)

    def wait(self) -> None:
        """Until the last save is on the disk, on all ranks; OSError where it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            while not wait([writing], _SLICE).done:
                self._beat()
            self.ranks.run_or_abort_all(writing.result)

    def drop_older(self, step: int) -> None:
        """Keep, besides the checkpoint of ``step``, those that ``run.checkpoint`` says; all ranks call it.

        Many ranks do it once the save that is in progress is done; if that fails, nothing is dropped.
        """
        if self.ranks.world == 1:
            self._keep_newest(step)
            return
        self._writing = self._executor.submit(self._drop_after, self._writing, step)

    def _drop_after(self, saving: Future[None] | None, step: int) -> None:
        if saving is not None:
            saving.result()
        self._keep_newest(step)

    def set_aside(self, step: int) -> GoingOn:
        """Where ``--resume`` goes on after the weights of ``step`` gave nothing but skipped steps.

        The first rank renames the checkpoints of those weights, if there is an earlier one to go on from.
        """
        return set_aside(self.folder, step) if self.ranks.is_main else GoingOn(None, ())

    @property
    def failed(self) -> bool:
        """Whether ``wait`` would raise, as far as this rank knows by now."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After an error too: a thread without its process group does not end, and Python waits for it in the end. This
        # one needs nothing of the other ranks but theirs, which fail as soon as those are gone.
        if isinstance(error, Exception) and self._writing is not None and not self._writing.done():
            print(f"rank {self.ranks.rank} ends once its checkpoint is written: {error!r}", file=sys.stderr, flush=True)
        self._executor.shutdown()

    def _keep_newest(self, step: int) -> None:
        if self.ranks.is_main:
            settings = self.run.checkpoint
            keep_newest(self.folder, step, settings.keep, settings.keep_every, lowest_loss)

    def _begin(self, step: int) -> Path:
        """On the first rank: the folder it made for all. It may fail there alone, so nothing is exchanged in here."""
        if not self.ranks.is_main:
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

    def _complete(
        self, partial: Path, shards: Future[Any], position: TrainerState, random: Mapping[str, Tensor]
    ) -> None:
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
        self, partial: Path, position: TrainerState, random: Mapping[str, Tensor], parts: list[Entries]
    ) -> str | None:
        """On the first rank: the small files, the manifest and the name of a finished checkpoint; what went wrong."""
        if not self.ranks.is_main:
            return None
        try:
            write_small_files(partial, self.run, position, random, self.data)
            small = flushed_entries(partial, [path for path in all_files(partial) if path.parent == partial])
            complete_checkpoint(partial, position.step, {k: v for part in (*parts, small) for k, v in part.items()})
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
