"""Checkpoints of the reference releases as they lie on disk: ``consolidated.pth`` with ``config.json`` beside it."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gecko.json_file import read_object

CONFIG, WEIGHTS = "config.json", "consolidated.pth"


def read_release(source: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model's config fields and its parameters, for ``gecko.convert.from_reference``.

    Only tensors are read from the file (``weights_only``): nothing in it is run.

    Args:
        source: the folder, or the file with the weights in it, whatever its name.

    Raises:
        FileNotFoundError: the folder or one of the files is missing.
        ValueError: the weights are divided over several files, or a file holds something else.
    """
    source = Path(source).expanduser()
    weights = source if source.is_file() else _find_weights(source)
    return _read_config(weights.with_name(CONFIG)), _read_weights(weights)


def _find_weights(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"SOURCE must be a folder with {WEIGHTS} and {CONFIG}, or a .pth file; there is no {folder}."
        )
    found = sorted(folder.glob("*.pth"))
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    if len(found) == 1:
        return found[0]
    if not found:
        raise FileNotFoundError(f"{folder} must hold {WEIGHTS}, the release's weights; it has no .pth file.")
    raise ValueError(
        f"{folder} must hold the weights in one {WEIGHTS}; it has {len(found)} .pth files, from {found[0].name} to "
        f"{found[-1].name}. Consolidate them with the release's own script for one model-parallel rank, or name one."
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"the release's {CONFIG} must lie beside the weights; there is no {path}.")
    config = read_object(path, "the release's config")
    config = config.get("model", config)
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object under 'model', if it has one; got a {type(config).__name__}.")
    if "model_type" in config:
        raise ValueError(f"{path} is of a {config['model_type']!r} folder, not of a reference release.")
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} must hold tensors as torch.save writes them, and nothing else; it holds something that could be "
            "code, and was not opened."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} must be a file written by torch.save; it could not be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{path} must hold parameters by name; it holds a {type(state).__name__} of other things.")
    return state
