"""A model on disk: a folder with ``config.json`` and ``model.safetensors``, which transformers reads as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gecko.config import MODEL_TYPE, GeckoConfig
from gecko.files import load_tensors, save_tensors, whole_file

WEIGHTS, CONFIG, FORMAT = "model.safetensors", "config.json", "gecko-model-1"
TIED = ("head.weight", "embedding.weight")


def save_model(folder: str | Path, config: GeckoConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a model's folder; a tied head is stored once, as the embedding.

    Raises:
        OSError: the disk refused; files that were there before survive.
    """
    folder = Path(folder)
    stored = {name: w for name, w in weights.items() if not (config.tie_embedding and name == TIED[0])}
    # transformers refuses files whose "format" names no framework.
    save_tensors(folder / WEIGHTS, stored, {"format": "pt", "gecko": FORMAT, "config": json.dumps(config.to_dict())})
    fields = {"model_type": MODEL_TYPE, "architectures": ["GeckoForCausalLM"], **config.to_dict()}
    with whole_file(folder / CONFIG) as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def load_model(folder: str | Path) -> tuple[GeckoConfig, dict[str, Tensor]]:
    """Config and weights of a model's folder.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is damaged, or the two are of different models.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} must be a model's folder with {CONFIG} and {WEIGHTS}; it has no {CONFIG}.")
    config = GeckoConfig.load(folder / CONFIG)
    weights, metadata = load_tensors(folder / WEIGHTS)
    found = metadata.get("gecko", metadata.get("format", "another file"))
    if found != FORMAT:
        raise ValueError(f"{folder / WEIGHTS} must hold a model's weights ({FORMAT}); it holds {found}.")
    written = GeckoConfig.from_dict(json.loads(metadata["config"]))
    if written != config:
        names = [name for name, value in written.to_dict().items() if config.to_dict()[name] != value]
        raise ValueError(f"{folder / CONFIG} and {folder / WEIGHTS} must describe one model; they differ in {names}.")
    if config.tie_embedding:
        weights[TIED[0]] = weights[TIED[1]]
    return config, weights
