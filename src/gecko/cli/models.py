"""What MODEL means on the command line: a model's folder, or a run's, with the tokenizer it was trained with."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from gecko.baselines import LanguageModel, LlamaConfig, load_any, load_config
from gecko.baselines.models import PRESETS
from gecko.data import Tokenizer, check_vocabulary, load_tokenizer
from gecko.data.tokenizer_files import TOKENIZERS
from gecko.model import Gecko, load
from gecko.quantize import is_quantized
from gecko.store import CONFIG, WEIGHTS

RECIPE = "recipe.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Of the weights: float32 or bfloat16.", show_default="as stored")
]
_NAME_IT = "Name it yourself: --tokenizer bytes, or the path of a tokenizer.json."


def find_model(name: str) -> Path:
    """The folder with the model's files; of a run, its newest sound checkpoint.

    Raises:
        FileNotFoundError, ValueError: there is no such folder, it holds no model, or only damaged ones.
    """
    from gecko.train import latest_checkpoint

    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        return folder
    checkpoints = folder / "checkpoints"
    newest = latest_checkpoint(checkpoints) if checkpoints.is_dir() else None
    if newest is None:
        raise FileNotFoundError(_nothing_there(folder))
    if not (newest / WEIGHTS).is_file():
        raise FileNotFoundError(
            f"{newest} must hold {WEIGHTS}; it is a checkpoint of several ranks, each of which wrote its part. "
            f"Join them: gecko consolidate {folder}"
        )
    return newest


def find_tokenizer(folder: Path, given: str | None, vocab_size: int) -> Tokenizer:
    """The tokenizer ``given``, else the one that lies beside the model, else the one that the recipe there names.

    Raises:
        FileNotFoundError, ValueError: there is none of them, or the tokenizer has more ids than the model.
    """
    tokenizer = _own_tokenizer(folder) if given is None else load_tokenizer(given)
    check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def _own_tokenizer(folder: Path) -> Tokenizer:
    from gecko.train.same_tokenizer import known_tokenizer

    known = known_tokenizer(folder)
    if known is None:
        raise FileNotFoundError(
            f"the model's tokenizer must lie beside it ({' or '.join(TOKENIZERS)}) or be named by {folder / RECIPE}, "
            f"which training writes; there is neither. {_NAME_IT}"
        )
    try:
        return load_tokenizer(known)
    except FileNotFoundError as error:
        recipe = folder / RECIPE
        raise FileNotFoundError(f"the tokenizer that {recipe} names is not here: {error} {_NAME_IT}") from error


def load_model(name: str, tokenizer: str | None, device: str, dtype: str | None) -> tuple[Gecko, Tokenizer]:
    """The model that MODEL means, on a device, with its tokenizer; arguments and errors as above and below.

    ``dtype`` is what weights are rounded or widened to; None: as they are stored.

    In evaluation mode: commands that train do not come here, and to change the mode for every token takes time.
    """
    wanted = None if dtype is None else named_dtype(dtype)
    folder = find_gecko(name)
    model = load(folder)
    _place(model, device, wanted)
    return model, find_tokenizer(folder, tokenizer, model.config.vocab_size)


def find_gecko(name: str) -> Path:
    """``find_model`` for commands that are not for a Llama: ValueError if it is one."""
    folder = find_model(name)
    if isinstance(load_config(folder / CONFIG), LlamaConfig):
        raise ValueError(
            f"MODEL must be a Gecko, as this command works with its blocks and states; {name} is a Llama. "
            "gecko eval and gecko info take it, and transformers opens its folder."
        )
    return folder


def load_any_model(name: str, tokenizer: str | None, device: str, dtype: str | None) -> tuple[LanguageModel, Tokenizer]:
    """``load_model`` for a Llama too."""
    wanted = None if dtype is None else named_dtype(dtype)
    folder = find_model(name)
    model = load_any(folder)
    _place(model, device, wanted)
    return model, find_tokenizer(folder, tokenizer, model.config.vocab_size)


def named_dtype(name: str) -> torch.dtype:
    """ValueError for a name that ``--dtype`` does not take."""
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {name!r}.")
    return DTYPES[name]


def _place(model: nn.Module, device: str, dtype: torch.dtype | None) -> None:
    """On the device, in the dtype unless it is None, for inference."""
    from gecko.train.hardware import select_device

    if dtype is not None and any(map(is_quantized, model.parameters())):
        raise ValueError("--dtype is for models that are not quantised; this one is. Leave it out.")
    model.to(device=select_device(device), dtype=dtype).eval()


def trained_length(name: str) -> int | None:
    """Tokens of the rows that MODEL was trained on; None where no recipe lies beside it."""
    from gecko.train import Run

    recipe = find_model(name) / RECIPE
    return Run.load(recipe).sequence_length if recipe.is_file() else None


def _nothing_there(folder: Path) -> str:
    expected = f"MODEL must be a folder that holds a model ({CONFIG}) or a training run (checkpoints/)"
    if folder.is_dir():
        found = sorted(entry.name for entry in folder.iterdir())
        return f"{expected}; {folder} holds {', '.join(found[:8]) or 'nothing'}."
    if folder.name in PRESETS:
        return f"{expected}; {folder} is the name of an architecture, which knows no text yet. Train one: gecko train."
    return f"{expected}; there is no {folder}.{nearest_hint(folder)}"


def nearest_hint(path: Path) -> str:
    """A sentence about what lies where ``path`` would, under nearly that name; empty where nothing does."""
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {path.with_name(near[0])}?" if near else ""
