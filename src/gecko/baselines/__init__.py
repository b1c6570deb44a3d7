"""Llama 2, which Gecko is compared with, and what trainer and plan ask of either."""

from gecko.baselines.config import LlamaConfig
from gecko.baselines.llama import Llama
from gecko.baselines.models import LanguageModel, ModelConfig, build_model, load_any, load_config, meta_model

__all__ = [
    "LanguageModel", "Llama", "LlamaConfig", "ModelConfig", "build_model", "load_any", "load_config", "meta_model",
]  # fmt: skip
