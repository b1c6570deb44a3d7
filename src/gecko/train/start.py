"""The model that a run starts with, on one device or divided among ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gecko.baselines import LanguageModel, build_model, load_any, meta_model
from gecko.model import Block
from gecko.parallel.fsdp import empty_sharded_model, fill
from gecko.parallel.mesh import Ranks
from gecko.store import CONFIG, WEIGHTS
from gecko.train.checkpoint import latest_checkpoint
from gecko.train.run import Run
from gecko.train.same_tokenizer import check_same_tokenizer
from gecko.train.snapshot import SHARDS


def starting_model(run: Run, ranks: Ranks, device: torch.device, *, fresh: bool) -> LanguageModel:
    """A new model, or the one of ``run.init_from``; where not ``fresh`` the weights are still to be loaded.

    Of many ranks only the first makes the whole model, on the CPU; each gets its part of it.
    """
    if ranks.world == 1:
        model = (_initial(run) if fresh else build_model(run.model)).to(device)
        return _configured(model, run)
    template = _configured(meta_model(run.model), run)
    bfloat16 = run.precision == "bfloat16"
    model = empty_sharded_model(template, ranks.sharding_mesh, device, bfloat16=bfloat16)
    if fresh:
        weights = ranks.agree(lambda: dict(_initial(run).named_parameters()) if ranks.first else None)
        fill(model, weights)
    return model


def _configured(model: LanguageModel, run: Run) -> LanguageModel:
    model.activation_checkpointing = run.activation_checkpointing
    if run.compile:
        for block in model.blocks:
            compile_block(block)
    return model


def compile_block(block: nn.Module) -> None:
    """Compile a block but for what mixes tokens: documents lie elsewhere in every batch, and that is laid out on the
    host. What is left has one shape, so that it is compiled once and recomputed by the same code."""
    if isinstance(block, Block):  # a Llama's attention is never compiled
        mixer: Any = block.mixer
        for module in (mixer.norm, mixer.cema):
            module.forward = torch.compiler.disable(module.forward)
        mixer._mix = torch.compiler.disable(mixer._mix)
    block.compile(dynamic=False)


def _initial(run: Run) -> LanguageModel:
    if run.init_from is None:
        return build_model(run.model)
    folder = _model_folder(Path(run.init_from).expanduser())
    _check_joined(folder)
    model = load_any(folder)
    found = model.config.to_dict()
    different = [name for name, value in run.model.to_dict().items() if found.get(name, ...) != value]
    if different:
        raise ValueError(
            f"init_from must hold a model of this run's architecture; {folder} differs in {', '.join(different)}. "
            "Set model.* to what its config.json says."
        )
    if not all(parameter.is_floating_point() for parameter in model.state_dict().values()):
        raise ValueError(f"init_from must hold a model that is not quantised; {folder} is. Use the one it was made of.")
    check_same_tokenizer(folder, run.data.tokenizer)
    return model.float()


def _model_folder(folder: Path) -> Path:
    """``folder`` itself, or the newest checkpoint of the run in it."""
    checkpoints = folder / "checkpoints"
    if (folder / CONFIG).is_file() or not checkpoints.is_dir():
        return folder
    newest = latest_checkpoint(checkpoints)
    if newest is None:
        raise FileNotFoundError(f"init_from must hold a model or a run with a checkpoint; {folder} has none yet.")
    return newest


def _check_joined(folder: Path) -> None:
    if (folder / SHARDS).is_dir() and not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(
            f"init_from must hold {WEIGHTS}; {folder} is a checkpoint of several ranks, each of which wrote its part. "
            f"Join them: gecko consolidate {folder}"
        )
