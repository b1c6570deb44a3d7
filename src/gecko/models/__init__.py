"""Architectures that a run can train: Gecko, and Llama 2 as the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gecko.config import MODEL_TYPE as GECKO
from gecko.config import PRESETS as GECKO_PRESETS
from gecko.config import GeckoConfig, named
from gecko.io.checkpoints import model_folder
from gecko.io.files import read_object
from gecko.io.model_folder import CONFIG
from gecko.models.gecko import Gecko, load
from gecko.models.llama import MODEL_TYPE as LLAMA
from gecko.models.llama import PRESETS as LLAMA_PRESETS
from gecko.models.llama import Llama, LlamaConfig, load_llama
from gecko.records import FieldError, build, fields_of, unknown_name
from gecko.runtime.tensors import meta_device

__all__ = [
    "LanguageModel", "Llama", "LlamaConfig", "ModelConfig", "build_model", "load_any", "load_config", "meta_model",
]  # fmt: skip

ModelConfig = GeckoConfig | LlamaConfig
LanguageModel = Gecko | Llama
"""Model of any architecture. Training uses ``config``, ``blocks``, ``activation_checkpointing``, ``sharded``,
``float32_layers``, ``loss``, ``loss_of_layout``, ``token_losses`` and ``save``."""

CONFIGS: dict[str, type[ModelConfig]] = {GECKO: GeckoConfig, LLAMA: LlamaConfig}
"""Config class by ``model_type``."""
PRESETS: dict[str, ModelConfig] = {**GECKO_PRESETS, **LLAMA_PRESETS}


def build_model(config: ModelConfig) -> LanguageModel:
    """Build a model with random weights from PyTorch's generator. A Llama raises ImportError without transformers."""
    return Llama(config) if isinstance(config, LlamaConfig) else Gecko(config)


def meta_model(config: ModelConfig) -> LanguageModel:
    """Build a model on the device ``meta``, without memory for its parameters."""
    with meta_device():
        return build_model(config)


def load_config(path: str | Path) -> ModelConfig:
    """Load the ``config.json`` of any architecture; without ``model_type``, of a Gecko. Raise ValueError if it is of
    another kind of model, or not a config."""
    kind = read_object(path, "a model config").get("model_type", GECKO)
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise ValueError(f"{path} must be of one of the kinds {', '.join(CONFIGS)}; it is of {kind!r}.")
    return CONFIGS[kind].load(path)


def load_any(folder: str | Path) -> LanguageModel:
    """Load a model folder or run of any architecture. Errors are those of ``gecko.load``."""
    folder = model_folder(folder)
    # Without a config, Gecko's loader reports what is missing.
    is_llama = (folder / CONFIG).is_file() and isinstance(load_config(folder / CONFIG), LlamaConfig)
    return load_llama(folder) if is_llama else load(folder)


def find_preset(name: str) -> ModelConfig:
    """Return the preset of any architecture. An unknown name raises ValueError with the nearest one."""
    return named(PRESETS, name)


def model_type(config: ModelConfig) -> str:
    """Return the name of a config's architecture, as recipes use it."""
    return next(name for name, kind in CONFIGS.items() if isinstance(config, kind))


def parse_config(value: Any, name: str, texts: bool) -> ModelConfig:
    """Convert as ``records.convert``, to the architecture ``model_type``; without it, as in older files, a Gecko."""
    if isinstance(value, ModelConfig):
        return value
    fields = dict(fields_of(value, name))
    kind = fields.pop("model_type", GECKO)
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise FieldError(unknown_name(f"{name}.model_type", kind, CONFIGS), name)
    return build(CONFIGS[kind], fields, f"{name}.", texts=texts)
