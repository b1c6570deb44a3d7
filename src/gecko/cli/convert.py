"""``gecko convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from gecko.config import GeckoConfig


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="The release's folder, with config.json and consolidated.pth.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must hold no model yet.")],
) -> None:
    """Turn a checkpoint of the reference release of Gecko or Megalodon into a folder of this package.

    The folder opens with `gecko.load`, with every command here, and in transformers. Weights are kept as they
    are, in the widest dtype among them, and a tokenizer beside them goes along. Nothing in the files is run.

    **Examples**

        gecko convert downloads/gecko-7b models/gecko-7b

        gecko generate models/gecko-7b --prompt "Once upon"
    """
    from gecko.convert import from_reference
    from gecko.data.tokenizer_files import copy_tokenizer, holds_tokenizer
    from gecko.release import read_release
    from gecko.store import CONFIG, save_model

    source, out = source.expanduser(), out.expanduser()
    if (out / CONFIG).exists():
        raise ValueError(f"OUT must hold no model yet; {out} has a {CONFIG}. Choose another folder.")
    config, weights = from_reference(*read_release(source))
    _check_shapes(config, weights)
    weights = _of_one_dtype(weights)
    save_model(out, config, weights)
    beside = source.parent if source.is_file() else source
    if holds_tokenizer(beside):
        copy_tokenizer(str(beside), out)
    count = sum(tensor.numel() for name, tensor in weights.items() if not (config.tie_embedding and "head" in name))
    kind = "Megalodon" if config.memory == "none" else "Gecko"
    dtype = str(weights["embedding.weight"].dtype).removeprefix("torch.")
    typer.echo(f"{out}: {kind}, {config.num_layers} layers, {count:,} parameters in {dtype}")


def _check_shapes(config: GeckoConfig, weights: dict[str, Tensor]) -> None:
    """Compare with a model that takes no memory."""
    import torch

    from gecko.model import Gecko

    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Gecko(config).state_dict().items()}
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise ValueError(f"the checkpoint must hold every parameter of its config; it lacks {_few(missing)}.")
    wrong = [
        f"{name} {tuple(tensor.shape)} for {expected.get(name, 'none')}"
        for name, tensor in weights.items()
        if tuple(tensor.shape) != expected.get(name)
    ]
    if wrong:
        raise ValueError(f"the checkpoint's parameters must have the shapes of its config; got {_few(wrong)}.")


def _of_one_dtype(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    import torch

    widest = next(iter(weights.values())).dtype
    for tensor in weights.values():
        widest = torch.promote_types(widest, tensor.dtype)
    return {name: tensor.to(widest) for name, tensor in weights.items()}


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
