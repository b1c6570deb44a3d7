"""The model that a run trains: new or from another one, sharded, with adapters, compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gecko.io.checkpoints import model_folder
from gecko.io.quantization import is_quantized
from gecko.models import LanguageModel, build_model, load_any, meta_model
from gecko.models.gecko import Block
from gecko.parallel.fsdp import empty_sharded_model, fill
from gecko.parallel.mesh import Ranks
from gecko.train.checkpoints.lora import add_adapters
from gecko.train.float8 import use_float8
from gecko.train.run import Run, is_half
from gecko.train.tokenizer import check_same_tokenizer


def starting_model(run: Run, ranks: Ranks, device: torch.device, *, fresh: bool) -> LanguageModel:
    """Return a new model or that of ``run.init_from``. Without ``fresh``, its weights are still to be loaded.

    With several ranks, only the first builds the whole model, on the CPU; each rank receives its shards.
    """
    if ranks.world == 1:
        # Adapters do not contain the weights that they change.
        model = (_initial(run) if fresh or run.lora_rank is not None else build_model(run.model)).to(device)
        if run.lora_rank is not None:
            add_adapters(model, run.lora_rank)
        return configured(model, run)
    if run.lora_rank is not None:
        raise ValueError(f"lora_rank trains adapters in one process; got {ranks.world}. Set lora_rank=none.")
    template = configured(meta_model(run.model), run)
    model = empty_sharded_model(template, ranks.sharding_mesh, device, bfloat16=is_half(run.precision))
    if fresh:
        weights = ranks.run_or_abort_all(lambda: dict(_initial(run).named_parameters()) if ranks.is_main else None)
        fill(model, weights)
    return model


def configured(model: LanguageModel, run: Run) -> LanguageModel:
    """Return ``model`` with the run's settings; its blocks are compiled if the run says so."""
    model.activation_checkpointing, model.z_loss = run.activation_checkpointing, run.z_loss
    use_float8(model, run.precision)
    if run.compile:
        for block in model.blocks:
            compile_block(block)
    return model


def compile_block(block: nn.Module, **settings: Any) -> None:
    """Compile a block by ``torch.compile`` with ``settings``, except the operators that mix tokens.

    The layout of these depends on the documents of each batch and is computed on the host. The rest has fixed shapes,
    so it is compiled once and recomputed by the same code. On a context rank the whole mixer is excepted.
    """
    if isinstance(block, Block):  # a Llama's attention is never compiled
        mixer: Any = block.mixer
        for module in (mixer.norm, mixer.cema):
            module.forward = torch.compiler.disable(module.forward)
        mixer.mix = torch.compiler.disable(mixer.mix)
        alone, on_rank = mixer.forward, torch.compiler.disable(mixer.forward)
        mixer.forward = lambda x, state, segments: (on_rank if segments.exchange else alone)(x, state, segments)
    block.compile(dynamic=False, **settings)


def _initial(run: Run) -> LanguageModel:
    if run.init_from is None:
        return build_model(run.model)
    folder = model_folder(run.init_from)
    model = load_any(folder)
    found = model.config.to_dict()
    different = [name for name, value in run.model.to_dict().items() if found.get(name, ...) != value]
    if different:
        raise ValueError(
            f"init_from must hold a model of this run's architecture; {folder} differs in {', '.join(different)}. "
            "Set model.* to what its config.json says."
        )
    if any(map(is_quantized, model.state_dict().values())):
        raise ValueError(f"init_from must hold a model that is not quantised; {folder} is. Use the one it was made of.")
    check_same_tokenizer(folder, run.data.tokenizer)
    return model.float().train()
