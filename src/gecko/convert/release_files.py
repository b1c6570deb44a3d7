"""Read the files of the reference releases. No code in them is run.

A release is a folder with ``config.json`` and either ``consolidated.pth`` or, of the authors' later models, a folder
``full_model.tpNN`` for every tensor-parallel rank, which PyTorch's distributed checkpoints wrote.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gecko.io.files import read_object

CONFIG, WEIGHTS, PARTS = "config.json", "consolidated.pth", ("full_model.tp", "sharded_model.tp")
_BY_COLUMN = ("embed.weight", ".wo.weight", ".fc2.weight")
"""Ends of the names of weights of which a tensor-parallel rank holds columns; of the others it holds rows."""


def read_release(source: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config fields and the parameters of a release, for ``gecko.convert.from_reference``.

    Only tensors are read from the file (``weights_only``); no code in it runs.

    Args:
        source: the folder, or a weights file in it, which may have any name.

    Raises:
        FileNotFoundError: the folder or one of the files is missing.
        ValueError: the weights are in several files, or a file has other content.
    """
    source = Path(source).expanduser()
    if parts := _parts(source):
        from gecko.convert.distributed_files import read_distributed  # it takes a second to import

        return _read_config(source / CONFIG), joined([read_distributed(part) for part in parts])
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
        raise FileNotFoundError(
            f"{folder} must hold {WEIGHTS} or {PARTS[0]}00, the release's weights; it has no .pth file."
        )
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


def _parts(folder: Path) -> list[Path]:
    """Return the folders of all tensor-parallel ranks in ``folder``; none if it holds no distributed checkpoint."""
    for prefix in PARTS:
        found = sorted(folder.glob(f"{prefix}*")) if folder.is_dir() else []
        wanted = [folder / f"{prefix}{rank:02d}" for rank in range(len(found))]
        if found != wanted:
            names = ", ".join(path.name for path in found)
            raise ValueError(f"{folder} must hold {prefix}00 and those of all other ranks; it has {names}.")
        if found:
            return found
    return []


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the parameters of which tensor-parallel ranks hold ``parts``.

    Raises:
        ValueError: the parts have different names, or shapes that do not fit together.
    """
    for rank, part in enumerate(parts):
        if other := part.keys() ^ parts[0].keys():
            raise ValueError(f"all tensor ranks must hold the same names; ranks 0 and {rank} differ in {min(other)}.")
    whole = {}
    for name in parts[0]:
        of_ranks = [part[name] for part in parts]
        try:  # numbers, such as the counts of priors, are on every rank
            axis = int(name.endswith(_BY_COLUMN))
            whole[name] = torch.cat(of_ranks, axis) if of_ranks[0].dim() else torch.stack(of_ranks)
        except (RuntimeError, IndexError) as error:
            shapes = [tuple(x.shape) for x in of_ranks]
            raise ValueError(f"the parts of {name} must fit together; they have shapes {shapes}.") from error
    return whole
