"""``gecko train``: train a model by a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated

import typer

from gecko.cli.common import Overrides


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Name of a recipe, or path of a run's recipe.json.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint; start from scratch if there is none.")
    ] = False,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FOLDER", help="Folder of the run; short for output=FOLDER.")
    ] = None,
    replay: Annotated[
        int | None,
        typer.Option("--replay", metavar="STEP", help="Print the text that the model reads in this step, and exit."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print every setting with its value and meaning, and exit.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
) -> None:
    """Train a model by a recipe.

    The run's folder receives checkpoints, metrics and a report. Ctrl-C and SIGTERM save a checkpoint before they stop
    the run, with exit code 0; `--resume` continues it with the same results as without the stop. For several GPUs or
    machines put `torchrun … -m` before `gecko`; the settings `parallel.…` say how the ranks share the work.

    **Examples**

        gecko train --list

        gecko train tiny --show

        gecko train tiny --out runs/demo

        gecko train tiny data.source='books/*.txt' minutes=30 --out runs/books

        gecko train tiny --out runs/demo --resume

        torchrun --nproc-per-node=8 --max-restarts=3 -m gecko train gecko_125m gradient_accumulation_steps=2 --resume

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
