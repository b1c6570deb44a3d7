"""What a checkpoint of a training run holds: all that decides the steps to come."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gecko.model import Gecko
from gecko.train.checkpoint import keep_newest, write_checkpoint
from gecko.train.optimizer import load_optimizer_tensors, optimizer_tensors
from gecko.train.run import Run

RECIPE = "recipe.json"
_OPTIMIZER, _RANDOM, _TRAINER = "optimizer.safetensors", "random.safetensors", "trainer.json"


@dataclass(frozen=True)
class Position:
    """Where a run is."""

    step: int = 0
    """Finished steps, the skipped ones too; also the index of the next batch."""
    seconds: float = 0.0
    """Time spent so far, over all sessions."""
    skipped: int = 0
    """Steps skipped for a non-finite loss or gradient, ..."""
    consecutive_skips: int = 0
    """... and those of them since the last step that was taken."""


def checkpoints_folder(run: Run) -> Path:
    return run.folder / "checkpoints"


def save_snapshot(run: Run, model: Gecko, optimizer: torch.optim.Optimizer, position: Position) -> Path:
    """Write the checkpoint of ``position`` and drop the ones beyond ``run.checkpoint.keep``."""

    def write_files(folder: Path) -> None:
        model.save(folder)
        save_file(optimizer_tensors(model, optimizer), folder / _OPTIMIZER)
        save_file(_random_state(), folder / _RANDOM)
        (folder / _TRAINER).write_text(json.dumps(asdict(position), indent=2) + "\n", encoding="utf-8")
        run.save(folder / RECIPE)

    path = write_checkpoint(checkpoints_folder(run), position.step, write_files)
    keep_newest(path.parent, run.checkpoint.keep)
    return path


def restore_snapshot(path: Path, model: Gecko, optimizer: torch.optim.Optimizer) -> Position:
    """Load optimizer and random state of a verified checkpoint. The model was loaded from it by ``gecko.load``."""
    load_optimizer_tensors(model, optimizer, load_file(path / _OPTIMIZER))
    _set_random_state(path / _RANDOM)
    return Position(**json.loads((path / _TRAINER).read_text(encoding="utf-8")))


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(path: Path) -> None:
    state = load_file(path)
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
