"""Content of a run's checkpoints: what they hold, how it is written, read and averaged."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor

from gecko.data.tokenizers import TEMPLATE, ByteTokenizer, copy_tokenizer, holds_tokenizer, write_byte_tokenizer
from gecko.io.checkpoints import SHARDS, checkpoint_step, read_manifest
from gecko.io.files import parse_object, whole_file
from gecko.io.model_folder import CONFIG, FLOATS, REMEDY, WEIGHTS, check_finite, check_layout, reading, stored_prefix
from gecko.models import LanguageModel, load_config, meta_model
from gecko.records import CountFromZero, NotNegative, build, check
from gecko.train.checkpoints.folders import flushed_entries, write_manifest
from gecko.train.metrics import DataRecord
from gecko.train.model import check_base, has_adapters, merged, save_adapters
from gecko.train.optimizer import named_parameters, optimizer_tensors
from gecko.train.run import RECIPE, Run
from gecko.train.step import CarriedState

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
    own = run.tokenizer_folder
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


def read_tensors(path: Path, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Fill ``tensors``, which may be sharded in any way, from a checkpoint.

    All ranks call it together, or one rank with ``alone``. Raise ValueError if a tensor is missing, differs in shape or
    kind of dtype, or is not finite.
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
            check_layout(path, _stored(reader.read_metadata(), tensors), tensors)
            load_distributed(tensors, storage_reader=reader, no_dist=alone)
        except (CheckpointException, SafetensorError, LookupError, TypeError, RuntimeError) as failure:
            cause = next(iter(getattr(failure, "failures", {}).values()), (failure, None))[0]
            raise ValueError(f"{path} must hold the tensors of this model and its optimizer; {cause}") from failure
    check_finite(path, {name: x.to_local() if isinstance(x, DTensor) else x for name, x in tensors.items()})


def _stored(metadata: Any, names: Collection[str]) -> dict[str, Tensor]:
    """Return tensors on ``meta`` like those that a checkpoint holds, of the first part's dtype or another part's.

    A tensor whose parts do not add up to it has one dimension.
    """
    parts: dict[str, list[Any]] = {}
    for index, part in metadata.storage_data.items():
        parts.setdefault(index.fqn, []).append(part)
    found = {}
    for name in parts.keys() & names:
        size = metadata.state_dict_metadata[name].size
        elements = sum(part.shape.numel() for part in parts[name])
        dtype = next((part.dtype for part in parts[name] if part.dtype not in FLOATS), parts[name][0].dtype)
        found[name] = torch.empty(size if elements == size.numel() else (elements,), dtype=dtype, device="meta")
    return found


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
    """Restore PyTorch's CPU generator and, if saved, the current GPU's; ValueError names ``source`` if that fails."""
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
    checkpoint before the jump is then kept until the loss is as low again. ``checkpoints``
    has the newest first, and at least one.
    """
    return min(checkpoints, key=_recent_loss)


def _recent_loss(checkpoint: Path) -> float:
    """Return the mean of the recent losses; infinity if the checkpoint has none or is damaged."""
    try:
        losses = read_trainer_state(checkpoint).recent_losses
    except (ValueError, OSError):
        return math.inf
    return statistics.fmean(losses) if losses else math.inf
