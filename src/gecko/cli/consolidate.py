"""``gecko consolidate``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from gecko.data.tokenizer_files import copy_tokenizer, holds_tokenizer
from gecko.store import CONFIG


def consolidate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run's folder, or one of its checkpoints.")],
    out: Annotated[
        str | None, typer.Option("--out", metavar="FOLDER", help="Where to write; else into the checkpoint itself.")
    ] = None,
) -> None:
    """Join a checkpoint that several ranks wrote to one model file, which every command reads.

    A run does this by itself at its end. Needs memory for the model once, and no GPU.

    **Examples**

        gecko consolidate runs/1b

        gecko consolidate runs/1b/checkpoints/step-00010000 --out models/1b
    """
    from gecko.train import latest_checkpoint
    from gecko.train.checkpoint import verify_checkpoint
    from gecko.train.snapshot import RECIPE, write_model

    folder = Path(source).expanduser()
    if (folder / CONFIG).is_file():
        verify_checkpoint(folder)
        checkpoint = folder
    else:
        newest = latest_checkpoint(folder / "checkpoints")
        if newest is None:
            raise FileNotFoundError(f"SOURCE must be a run's folder or a checkpoint; there is none in {folder}.")
        checkpoint = newest
    target = checkpoint if out is None else Path(out).expanduser()
    if _holds_another(target, checkpoint):
        raise FileExistsError(
            f"--out must be a new folder, or have a model of the same configuration; {target} holds another model. "
            "Name another folder."
        )
    write_model(checkpoint, target)
    if target != checkpoint:
        shutil.copyfile(checkpoint / RECIPE, target / RECIPE)
        if holds_tokenizer(checkpoint):
            copy_tokenizer(str(checkpoint), target)
    typer.echo(f"{target}: the model of {checkpoint.name}")


def _holds_another(target: Path, checkpoint: Path) -> bool:
    """Whether the model in ``target``, if there is one, is not of the checkpoint's configuration."""
    from gecko.baselines import load_config

    if not (target / CONFIG).is_file():
        return False
    try:
        return load_config(target / CONFIG) != load_config(checkpoint / CONFIG)
    except ValueError:
        # Of a kind that is not Gecko's.
        return True
