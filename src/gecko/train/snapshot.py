"""What a checkpoint of a training run holds: all that decides the steps to come.

One rank writes whole tensors to ``model.safetensors`` and ``optimizer.safetensors``. Many write what each has
to files of their own in ``shards/`` (PyTorch's Distributed Checkpoint, as safetensors). Either is read by any
number of ranks, and nothing is pickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from gecko.baselines import LanguageModel, load_config, meta_model
from gecko.data.tokenizer_files import copy_tokenizer, holds_tokenizer
from gecko.store import CONFIG, WEIGHTS
from gecko.train.checkpoint import flushed_entries, read_manifest, write_manifest
from gecko.train.fields import build
from gecko.train.optimizer import named_parameters, optimizer_tensors
from gecko.train.run import Run

RECIPE, SHARDS = "recipe.json", "shards"
_OPTIMIZER, _RANDOM, _TRAINER = "optimizer.safetensors", "random.safetensors", "trainer.json"


@dataclass(frozen=True)
class Position:
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
    folder: Path, run: Run, model: LanguageModel, optimizer: torch.optim.Optimizer, position: Position
) -> None:
    """A checkpoint's files, by one rank that has all of the model."""
    model.save(folder)
    save_file(optimizer_tensors(model, optimizer), folder / _OPTIMIZER)
    write_small_files(folder, run, position, random_state())


def write_small_files(folder: Path, run: Run, position: Position, random: Mapping[str, Tensor]) -> None:
    """What is the same for all ranks: random state, position, config, recipe and tokenizer."""
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


def restore_snapshot(path: Path, model: LanguageModel, optimizer: torch.optim.Optimizer) -> Position:
    """Load the model, optimizer and random state of a verified checkpoint, all ranks together."""
    read_tensors(path, training_tensors(model, optimizer))
    _set_random_state(path / _RANDOM)
    return build(Position, json.loads((path / _TRAINER).read_text(encoding="utf-8")))


def read_tensors(path: Path, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Fill ``tensors``, sharded in any way, from a checkpoint; all ranks together, or one ``alone``.

    ValueError where it lacks one of them or has another shape.
    """
    shards = path / SHARDS
    reader = HuggingFaceStorageReader(str(shards if shards.is_dir() else path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        try:
            load_distributed(tensors, storage_reader=reader, no_dist=alone)
        except CheckpointException as failure:
            cause = next(iter(failure.failures.values()), (failure, None))[0]
            raise ValueError(f"{path} must hold the tensors of this model and its optimizer; {cause}") from failure


def write_model(checkpoint: Path, folder: Path) -> None:
    """Write, alone, the model of a checkpoint to ``folder`` as one ``model.safetensors``, which
    ``gecko.baselines.load_any`` reads.

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
