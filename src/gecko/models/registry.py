"""The architectures that a run may train, and which class makes a model of which config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gecko.baselines.config import MODEL_TYPE as LLAMA
from gecko.baselines.config import PRESETS as LLAMA_PRESETS
from gecko.baselines.config import LlamaConfig
from gecko.baselines.llama import Llama, load_llama
from gecko.config import MODEL_TYPE as GECKO
from gecko.config import PRESETS as GECKO_PRESETS
from gecko.config import GeckoConfig, named, read_fields
from gecko.model import Gecko, load
from gecko.store import CONFIG

ModelConfig = GeckoConfig | LlamaConfig
LanguageModel = Gecko | Llama
"""What training asks of either: ``config``, ``blocks``, ``activation_checkpointing``, ``sharded``,
``float32_layers``, ``loss``, ``token_losses`` and ``save``."""

CONFIGS: dict[str, type[ModelConfig]] = {GECKO: GeckoConfig, LLAMA: LlamaConfig}
"""By ``model_type``."""
PRESETS: dict[str, ModelConfig] = {**GECKO_PRESETS, **LLAMA_PRESETS}
_LOADERS: dict[type[ModelConfig], Callable[[Path], LanguageModel]] = {GeckoConfig: load, LlamaConfig: load_llama}


def build_model(config: ModelConfig) -> LanguageModel:
    """A new model, its weights drawn from PyTorch's generator. ImportError for a Llama without transformers."""
    return Llama(config) if isinstance(config, LlamaConfig) else Gecko(config)


def meta_model(config: ModelConfig) -> LanguageModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return build_model(config)


def load_config(path: str | Path) -> ModelConfig:
    """From the ``config.json`` of either; without a ``model_type`` it is a Gecko's.

    Raises:
        ValueError: it is of another kind of model, or no config.
    """
    kind = read_fields(path).get("model_type", GECKO)
    if kind not in CONFIGS:
        raise ValueError(f"{path} must be of one of the kinds {', '.join(CONFIGS)}; it is of {kind!r}.")
    return CONFIGS[kind].load(path)


def load_any(folder: str | Path) -> LanguageModel:
    """The model of a folder, whichever of the two it is. FileNotFoundError or ValueError as for ``gecko.load``."""
    folder = Path(folder)
    # Without a config it is Gecko's to say what is missing.
    kind = type(load_config(folder / CONFIG)) if (folder / CONFIG).is_file() else GeckoConfig
    return _LOADERS[kind](folder)


def find_preset(name: str) -> ModelConfig:
    """ValueError for an unknown name, with the nearest."""
    return named(PRESETS, name)


def model_type(config: ModelConfig) -> str:
    """What a recipe calls the kind of model."""
    return next(name for name, kind in CONFIGS.items() if isinstance(config, kind))
