"""Content of a run's checkpoints, and when they are written and removed.

One rank writes whole tensors to ``model.safetensors`` and ``optimizer.safetensors`` before training continues. Several
ranks copy their shards to host memory and write them to ``shards/`` while training continues (PyTorch's Distributed
Checkpoint with safetensors files). Any number of ranks can read either form, and nothing is pickled.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from gecko.data.byte_files import write_byte_tokenizer
from gecko.data.chat_templates import TEMPLATE
from gecko.data.tokenizers import ByteTokenizer, copy_tokenizer, holds_tokenizer
from gecko.io.checkpoints import CHECKPOINTS, SHARDS, Entries, checkpoint_step, read_manifest
from gecko.io.files import parse_object, whole_file
from gecko.io.model_folder import CONFIG, WEIGHTS
from gecko.io.tensors import REMEDY, reading
from gecko.models import LanguageModel, load_config, meta_model
from gecko.parallel.mesh import Ranks
from gecko.records import CountFromZero, NotNegative, build, check
from gecko.train.carried import CarriedState
from gecko.train.checkpoints.folders import (
    all_files,
    begin_checkpoint,
    complete_checkpoint,
    flushed_entries,
    keep_newest,
    write_checkpoint,
    write_failure,
    write_manifest,
)
from gecko.train.checkpoints.lora import check_base, has_adapters, merged, save_adapters
from gecko.train.checkpoints.shards import ShardWriter, read_tensors
from gecko.train.metrics import DataRecord
from gecko.train.optimizer import named_parameters, optimizer_tensors
from gecko.train.run import RECIPE, Run

_OPTIMIZER, _RANDOM, _TRAINER = "optimizer.safetensors", "random.safetensors", "trainer.json"
_LANES = "lanes.safetensors"


@dataclass(frozen=True)
class TrainerState:
    """Progress of a run, saved in each checkpoint."""

    step: CountFromZero = 0
    """Number of finished steps, including skipped ones; also the index of the next batch."""
    seconds: NotNegative = 0.0
    """Time spent in steps and evaluations so far, over all sessions."""
    elapsed: float = 0.0
    """Time of all sessions until this step, with everything that they did; 0 if an early version wrote it."""
    skipped: CountFromZero = 0
    """Number of skipped steps."""
    consecutive_skips: CountFromZero = 0
    """Number of steps skipped since the last step that was not skipped."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last finite steps, from which ``SpikeRule`` computes mean and deviation."""
    recent_grad_norms: tuple[float, ...] = ()
    """Gradient norms of the same steps."""

    def __post_init__(self) -> None:
        check(self)
        if not all(map(math.isfinite, (*self.recent_losses, *self.recent_grad_norms))):
            raise ValueError(
                "recent losses and gradient norms must be finite; they are those of steps that were taken."
            )


def checkpoints_folder(run: Run) -> Path:
    return run.folder / CHECKPOINTS


def tokenizer_folder(run: Run) -> Path:
    """Return the folder with the run's copy of the tokenizer, which is copied into every checkpoint."""
    return run.folder / "tokenizer"


def write_recipe(run: Run) -> None:
    """Write ``run`` to its folder, whole or not at all."""
    with whole_file(run.folder / RECIPE) as temporary:
        run.save(temporary)


def write_whole(
    folder: Path,
    run: Run,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    position: TrainerState,
    data: DataRecord,
    carried: CarriedState | None = None,
) -> None:
    """Write all files of a checkpoint from one process that holds the whole model."""
    if carried is not None:
        save_file(carried.tensors(), folder / _LANES)
    if has_adapters(model):
        merged(model).save(folder)
        save_adapters(model, folder)
    else:
        model.save(folder)
    save_file(optimizer_tensors(model, optimizer), folder / _OPTIMIZER)
    write_small_files(folder, run, position, random_state(), data)


def write_small_files(
    folder: Path, run: Run, position: TrainerState, random: Mapping[str, Tensor], data: DataRecord
) -> None:
    """Write the files that are not sharded: random and trainer state, data record, config, recipe and tokenizer."""
    data.save(folder)
    save_file(dict(random), folder / _RANDOM)
    (folder / _TRAINER).write_text(json.dumps(asdict(position), indent=2) + "\n", encoding="utf-8")
    run.model.save(folder / CONFIG)
    run.save(folder / RECIPE)
    write_tokenizer(run, folder)


def write_tokenizer(run: Run, folder: Path) -> None:
    """Write the files of the run's tokenizer and its chat template; those of bytes are for transformers."""
    own = tokenizer_folder(run)
    if holds_tokenizer(own):
        copy_tokenizer(str(own), folder)
        return
    template = (own / TEMPLATE).is_file()
    if template:
        shutil.copyfile(own / TEMPLATE, folder / TEMPLATE)
    if run.data.tokenizer == ByteTokenizer.name:
        write_byte_tokenizer(folder, chat=template)


def training_tensors(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return parameters by name and optimizer state by ``parameter name/state name``; sharded if the model is."""
    parameters = {name: parameter.detach() for name, parameter in named_parameters(model)}
    return {**parameters, **optimizer_tensors(model, optimizer)}


def restore_snapshot(
    path: Path, model: LanguageModel, optimizer: torch.optim.Optimizer, carried: CarriedState | None = None
) -> TrainerState:
    """Load model, optimizer, carried states and random state of a verified checkpoint. All ranks call it together."""
    if has_adapters(model):
        check_base(model, path)
    read_tensors(path, training_tensors(model, optimizer))
    if carried is not None:
        carried.restore(partial(read_tensors, path))
    with reading(path / _RANDOM):
        set_random_state(load_file(path / _RANDOM), path / _RANDOM)
    return read_trainer_state(path)


def read_trainer_state(path: Path) -> TrainerState:
    """Return the trainer state of a checkpoint. ValueError that names its file if it is damaged."""
    return parse_object(path / _TRAINER, "a trainer's state", partial(build, TrainerState))


def write_model(checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint to ``folder`` as one ``model.safetensors``; ``load_any`` reads the folder.

    One process calls it. ``folder`` may be the checkpoint itself: its manifest then lists the new file, and nothing is
    written if the file exists already. Raise OSError if writing fails.
    """
    if folder == checkpoint and WEIGHTS in read_manifest(checkpoint):
        return
    model = meta_model(load_config(checkpoint / CONFIG))
    model.load_state_dict(read_weights(checkpoint), strict=False, assign=True)
    model.save(folder)
    if folder == checkpoint:
        # ``save`` wrote the same config.json as before, so the checkpoint is still sound if the process is killed here.
        write_manifest(folder, {**read_manifest(folder), **flushed_entries(folder, [folder / WEIGHTS])})


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the parameters of a checkpoint by name, on the CPU; a weight that embedding and head share occurs once."""
    model = meta_model(load_config(checkpoint / CONFIG))
    weights = {name: torch.empty_like(weight, device="cpu").detach() for name, weight in model.named_parameters()}
    read_tensors(checkpoint, dict(weights), alone=True)
    return weights


def check_consecutive(checkpoints: Sequence[Path]) -> None:
    """Raise ValueError if the run saved another checkpoint between these, newest first, which is gone."""
    for count, (later, earlier) in enumerate(pairwise(checkpoints), start=1):
        every, after, until = (
            Run.load(later / RECIPE).checkpoint.every,
            checkpoint_step(earlier),
            checkpoint_step(later),
        )
        if (until - 1) // every > after // every:
            raise ValueError(
                f"the checkpoints to average must be consecutive; {later.name} and {earlier.name} are not, as one was "
                f"saved every {every} steps (older ones that are kept have the lowest loss, or are of "
                f"checkpoint.keep_every). Try --last {count}; a run keeps more with checkpoint.keep=N."
            )


def write_average(checkpoints: Sequence[Path], folder: Path) -> None:
    """Write the model whose weights are the means of those of ``checkpoints``, at least one, to ``folder``."""
    model = meta_model(load_config(checkpoints[0] / CONFIG))
    mean = read_weights(checkpoints[0])
    for count, checkpoint in enumerate(checkpoints[1:], start=2):
        for name, weight in read_weights(checkpoint).items():
            mean[name].lerp_(weight, 1 / count)
    model.load_state_dict(mean, strict=False, assign=True)
    model.save(folder)


def random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor], source: object) -> None:
    """Set the state of the generators; raise ValueError, which names ``source``, if they cannot have it."""
    try:
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{source} must hold the state of PyTorch's random numbers as cpu; {error}. {REMEDY}"
        ) from error


def lowest_loss(checkpoints: list[Path]) -> Path:
    """Return the checkpoint with the lowest mean training loss over its last steps; the newest of equal ones.

    If the loss jumps to higher finite values that ``SpikeRule`` accepts after a while, their mean is higher. The
    checkpoint before the jump is then kept until the loss is as low again.

    Args:
        checkpoints: newest first, at least one.
    """
    return min(checkpoints, key=_recent_loss)


def _recent_loss(checkpoint: Path) -> float:
    """Return the mean of the recent losses; infinity if the checkpoint has none or is damaged."""
    try:
        losses = read_trainer_state(checkpoint).recent_losses
    except (ValueError, OSError):
        return math.inf
    return statistics.fmean(losses) if losses else math.inf


_SLICE = 1.0
"""Seconds between two calls of ``beat``."""


class Checkpointer:
    """Context that saves checkpoints, and removes old ones when ``drop_older`` is called.

    With several ranks, each rank copies its shards to host memory, and a thread writes them while training continues.
    The threads use a process group of their own, because training uses the default one at the same time. ``beat`` is
    called while a rank waits for the disk. Every checkpoint contains ``data``
    and the states of ``carried`` at the time of the save.
    """

    def __init__(
        self, run: Run, ranks: Ranks, beat: Callable[[], None], data: DataRecord, carried: CarriedState | None = None
    ) -> None:
        self.run, self.ranks, self._beat, self.data, self._carried = run, ranks, beat, data, carried
        self.folder = checkpoints_folder(run)
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
        partial = self.ranks.main(lambda: self._begin(position.step))
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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

    def _begin(self, step: int) -> Path:
        """Create the folder and return it."""
        try:
            return begin_checkpoint(self.folder, step)
        except OSError as error:
            raise write_failure(self.folder, step, error) from error

    def _complete(
        self, partial: Path, shards: Future[Any], position: TrainerState, random: Mapping[str, Tensor]
    ) -> None:
        """Wait, in the thread, for the files of all ranks; then the first rank completes the checkpoint."""
        parts = self._gather(self._written(partial, shards))
        error = next((found for found, _ in parts if found is not None), None)
        if error is None:
            done = self._complete_first(partial, position, random, [part for _, part in parts])
            error = self._gather(done)[0]
        if error is not None:
            raise write_failure(self.folder, position.step, RuntimeError(error))

    def _written(self, partial: Path, shards: Future[Any]) -> tuple[str | None, Entries]:
        """Return an error message or None, and the manifest entries of this rank's files."""
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
        """Write the small files and the manifest on the first rank, and rename the folder. Return an error or None."""
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
    """Return the error message of ``work`` once it ends, or None. DCP's error class is not a subclass of Exception."""
    error = work.exception()
    if isinstance(error, CheckpointException):
        return "; ".join(str(found) for found, _ in error.failures.values())
    return None if error is None else str(error)
