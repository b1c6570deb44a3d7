"""``gecko quantize``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from gecko.cli.models import RECIPE, find_gecko
from gecko.data.tokenizer_files import SETTINGS, TOKENIZERS
from gecko.model import load
from gecko.quantize import quantize as quantize_model
from gecko.store import CONFIG, WEIGHTS

COMPANIONS = (RECIPE, *TOKENIZERS, *SETTINGS)
"""Files beside a model that say how to use it."""


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or a run's: its newest checkpoint.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The new model's folder.")],
    bits: Annotated[int, typer.Option(help="Of a weight: 8, or 4.")] = 8,
) -> None:
    """Write a smaller copy of a model: the matrices of its blocks in 8 or 4 bits.

    Every command takes the copy like the original. It is for inference, and its weights count as other
    weights: reading states of the one are not continued by the other.

    **Examples**

        gecko quantize runs/demo runs/demo-int8

        gecko generate runs/demo-int8 --prompt "def main("
    """
    source, target = find_gecko(model), Path(out).expanduser()
    if (target / CONFIG).exists():
        raise FileExistsError(f"OUT must be a new folder; {target} holds a model already. Name another one.")
    network = load(source)
    quantize_model(network, bits)
    network.save(target)
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    before, after = ((folder / WEIGHTS).stat().st_size for folder in (source, target))
    typer.echo(f"{target}: {after:,} bytes of weights, {after / before:.1%} of the {before:,} in {source}")
