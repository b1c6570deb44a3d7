"""Low-rank adapters (LoRA) of PEFT on the linear layers of a model's blocks, trained by the ordinary trainer.

The other parameters stay those of the model that the run starts from. A checkpoint holds the merged model, which every
command reads, and the adapters themselves, from which training resumes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gecko.io.model_folder import fingerprint, stored_prefix
from gecko.io.tensors import reading
from gecko.models import LanguageModel, meta_model
from gecko.runtime.process import require, without_log_warnings
from gecko.train.optimizer import named_parameters

ADAPTERS = "adapters.safetensors"
_BASE = "base"
"""Name of the starting model's fingerprint in the metadata of the file."""


def add_adapters(model: LanguageModel, rank: int) -> None:
    """Give every linear layer of the blocks an adapter, and freeze all other parameters.

    The adapters' output is scaled by 2, so that the learning rate need not change with the rank. They begin as zero.

    Raises:
        ImportError: PEFT is not installed.
    """
    with without_log_warnings():
        peft = require("peft", "finetune")
    base = fingerprint(model)
    blocks = {module for block in model.blocks for module in block.modules()}
    layers = [name for name, module in model.named_modules() if module in blocks and isinstance(module, nn.Linear)]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config, model)
    model.adapters_of = base  # type: ignore[assignment, unused-ignore]


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "adapters_of")


def merged(model: LanguageModel) -> LanguageModel:
    """Return a plain model whose weights are those of ``model`` with the adapters added; its tensors are not copied."""
    from peft.tuners.lora import LoraLayer

    weights: dict[str, Tensor] = {}
    adapted: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)
    ]
    for name, module in adapted:
        layer = module.get_base_layer()
        weights[f"{name}.weight"] = layer.weight.detach() + module.get_delta_weight("default").detach()
        if layer.bias is not None:
            weights[f"{name}.bias"] = layer.bias.detach()
    inside = tuple(f"{name}." for name, _ in adapted)
    others = {name: weight for name, weight in model.state_dict().items() if not name.startswith(inside)}
    plain = meta_model(model.config)
    plain.load_state_dict({**others, **weights}, assign=True)
    return plain


def save_adapters(model: LanguageModel, folder: Path) -> None:
    """Write the adapters beside the merged model of a checkpoint, under names like those of its weights."""
    prefix = stored_prefix(folder)
    tensors = {prefix + name: parameter.detach().contiguous() for name, parameter in named_parameters(model)}
    save_file(tensors, folder / ADAPTERS, metadata={_BASE: str(model.adapters_of)})


def check_base(model: LanguageModel, folder: Path) -> None:
    """Raise ValueError if the adapters in a checkpoint were trained on other weights than those of ``model``."""
    with reading(folder / ADAPTERS), safe_open(folder / ADAPTERS, framework="pt") as file:
        base = (file.metadata() or {}).get(_BASE)
    if base != str(model.adapters_of):
        raise ValueError(
            f"init_from must hold the weights that the adapters in {folder} were trained on, {base}; it holds "
            f"{model.adapters_of}. Put back the model that the run started from."
        )
