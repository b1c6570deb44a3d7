"""``gecko train``."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe's name, or the recipe.json of an earlier run.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint; starts if there is none.")
    ] = False,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FOLDER", help="Where the run is written; short for output=FOLDER.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the recipes and stop.")] = False,
) -> None:
    """Train a model by a recipe.

    The folder gets checkpoints, metrics and a report. Ctrl-C and SIGTERM save before they stop, with exit
    code 0, and the run goes on with `--resume` as if nothing had happened.

    **Examples**

        gecko train --list

        gecko train tiny --out runs/demo

        gecko train tiny data.source='books/*.txt' minutes=30 --out runs/books

        gecko train tiny --out runs/demo --resume
    """
    from gecko.recipes import apply_overrides, get_recipe
    from gecko.train import train as run_training

    if show_list:
        _list_recipes()
        return
    if recipe is None:
        raise ValueError("RECIPE must be named, for example: gecko train tiny. `gecko train --list` shows all.")
    changes = [*(overrides or []), *([] if out is None else [f"output={out}"])]
    run_training(apply_overrides(get_recipe(recipe), changes), resume=resume)


def _list_recipes() -> None:
    from gecko.recipes import RECIPES

    for name, recipe in RECIPES.items():
        about = inspect.getdoc(recipe) or inspect.getdoc(inspect.getmodule(recipe)) or ""
        typer.echo(f"{name:<14}{about.partition(chr(10))[0].replace('``', '')}")
