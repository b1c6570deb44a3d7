"""A model on disk: a folder with ``config.json`` and ``model.safetensors``, which transformers reads as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from gecko.config import GeckoConfig
from gecko.files import load_tensors, save_tensors, whole_file

WEIGHTS, CONFIG, FORMAT = "model.safetensors", "config.json", "gecko-model-1"
TIED = ("head.weight", "embedding.weight")


class StoredConfig(Protocol):
    @property
    def tie_embedding(self) -> bool: ...

    def to_dict(self) -> dict[str, Any]: ...

    def save(self, path: str | Path) -> None: ...

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self: ...

    @classmethod
    def load(cls, path: str | Path) -> Self: ...


C = TypeVar("C", bound=StoredConfig)


class Blank(Protocol):
    """A model to be filled."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any: ...

    def tie(self) -> None: ...


class Layout(NamedTuple):
    """How models of one architecture lie in their folder."""

    format: str
    """What the weights' file says of itself."""
    tied: tuple[str, str]
    """The head's weight and the embedding's, which may be one."""


GECKO = Layout(FORMAT, TIED)


def save_model(folder: str | Path, config: GeckoConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a model's folder; a tied head is stored once, as the embedding.

    Raises:
        OSError: the disk refused; files that were there before survive.
    """
    write_folder(folder, config, weights, GECKO)


def load_model(folder: str | Path) -> tuple[GeckoConfig, dict[str, Tensor]]:
    """Config and weights of a model's folder.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is damaged, or the two are of different models.
    """
    return read_folder(folder, GeckoConfig, GECKO)


def write_folder(folder: str | Path, config: StoredConfig, weights: Mapping[str, Tensor], layout: Layout) -> None:
    """``save_model`` for any architecture."""
    folder = Path(folder)
    stored = {name: w for name, w in weights.items() if not (config.tie_embedding and name == layout.tied[0])}
    # transformers refuses files whose "format" names no framework.
    metadata = {"format": "pt", "gecko": layout.format, "config": json.dumps(config.to_dict())}
    save_tensors(folder / WEIGHTS, stored, metadata)
    with whole_file(folder / CONFIG) as temporary:
        config.save(temporary)


def read_folder(folder: str | Path, kind: type[C], layout: Layout) -> tuple[C, dict[str, Tensor]]:
    """``load_model`` for the architecture whose configs are of ``kind``."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} must be a model's folder with {CONFIG} and {WEIGHTS}; it has no {CONFIG}.")
    config = kind.load(folder / CONFIG)
    weights, metadata = load_tensors(folder / WEIGHTS)
    found = metadata.get("gecko", metadata.get("format", "another file"))
    if found != layout.format:
        raise ValueError(f"{folder / WEIGHTS} must hold a model's weights ({layout.format}); it holds {found}.")
    written = kind.from_dict(json.loads(metadata["config"]))
    if written != config:
        names = [name for name, value in written.to_dict().items() if config.to_dict()[name] != value]
        raise ValueError(f"{folder / CONFIG} and {folder / WEIGHTS} must describe one model; they differ in {names}.")
    if config.tie_embedding:
        head, embedding = layout.tied
        weights[head] = weights[embedding]
    return config, weights


def fill(model: Blank, weights: Mapping[str, Tensor]) -> None:
    """Give a model without memory, on the device ``meta``, copies of these weights: never two models at once.

    Copies, because a file's tensors are its pages, which whoever writes to the file changes.
    """
    model.load_state_dict({name: weight.clone() for name, weight in weights.items()}, strict=True, assign=True)
    model.tie()
