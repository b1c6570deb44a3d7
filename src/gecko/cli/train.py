"""``gecko train``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
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
    replay: Annotated[
        int | None,
        typer.Option("--replay", metavar="STEP", help="Print what the model reads in this step, as text, and stop."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print every setting as it would run, and what it means, and stop.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the recipes and stop.")] = False,
) -> None:
    """Train a model by a recipe.

    The folder gets checkpoints, metrics and a report. Ctrl-C and SIGTERM save before they stop, with exit
    code 0, and the run goes on with `--resume` as if nothing had happened. For several GPUs or machines put
    `torchrun … -m` before `gecko`; `parallel.…` says how they share the work.

    **Examples**

        gecko train --list

        gecko train tiny --show

        gecko train tiny --out runs/demo

        gecko train tiny data.source='books/*.txt' minutes=30 --out runs/books

        gecko train tiny --out runs/demo --resume

        torchrun --nproc-per-node=8 --max-restarts=3 -m gecko train gecko_125m accumulation=2 --resume

        gecko train runs/demo/recipe.json --replay 117
    """
    from gecko.parallel.mesh import only_first_rank_reports
    from gecko.recipes import apply_overrides, get_recipe, shown
    from gecko.train import replayed
    from gecko.train import train as run_training

    if show_list:
        _list_recipes()
        return
    with only_first_rank_reports():
        if recipe is None:
            raise ValueError("RECIPE must be named, for example: gecko train tiny. `gecko train --list` shows all.")
        changes = [*(overrides or []), *([] if out is None else [f"output={out}"])]
        run = apply_overrides(get_recipe(recipe), changes)
    if show:
        _print(shown(run))
    elif replay is not None:
        _print(replayed(run, replay))
    else:
        run_training(run, resume=resume)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _list_recipes() -> None:
    from gecko.recipes import RECIPES

    for name, recipe in RECIPES.items():
        about = inspect.getdoc(recipe) or inspect.getdoc(inspect.getmodule(recipe)) or ""
        typer.echo(f"{name:<20}{about.partition(chr(10))[0].replace('``', '')}")
