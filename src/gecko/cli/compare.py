"""``gecko compare``."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

T = TypeVar("T")
_OVERRIDE = re.compile(r"[a-z_][a-z0-9_.]*=")


def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... KEY=VALUE...",
            help="Recipes by name or recipe.json, the first of which the others are compared with; and changes to all "
            "of them.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where runs and results are written.")],
    seeds: Annotated[str, typer.Option("--seeds", help="One run of each recipe for each of these.")] = "0",
    learning_rates: Annotated[
        str | None,
        typer.Option("--learning-rates", metavar="A,B,C", help="Tune first: short runs of each recipe with each rate."),
    ] = None,
    tuning_steps: Annotated[
        int | None, typer.Option("--tuning-steps", metavar="N", help="Steps of those short runs.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="By what part numbers of parameters may differ.")
    ] = 0.02,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at a time, each a process of its own.")] = 1,
) -> None:
    """Train recipes alike, and compare them.

    The same texts in the same order, tokens, optimizer and schedule for all; only models and learning rates differ.
    Interrupted, the same command goes on: Ctrl-C and SIGTERM save first. The folder gets a page with pictures
    (comparison.html), everything in comparison.json, and a folder for each run.

    **Examples**

        gecko compare compare_gecko compare_llama data.source='books/train/*.txt'
        data.validation='books/test/*.txt' --seeds 0,1,2 --jobs 2 --out runs/compare

        gecko compare compare_gecko compare_llama --learning-rates 2e-3,4e-3,8e-3 --tuning-steps 244 --out runs/tuned
    """
    from rich.console import Console

    from gecko.compare import Plan, Tuning
    from gecko.compare import compare as run_comparison

    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    recipes = [argument for argument in arguments if not _OVERRIDE.match(argument)]
    if (learning_rates is None) != (tuning_steps is None):
        raise ValueError(
            "--learning-rates and --tuning-steps go together, as --learning-rates 2e-3,4e-3 --tuning-steps 244."
        )
    tuning = None
    if learning_rates is not None and tuning_steps is not None:
        tuning = Tuning(_listed(learning_rates, float, "--learning-rates"), tuning_steps)
    folder, drawn = out.expanduser(), _listed(seeds, int, "--seeds")
    plan = Plan.of(recipes, overrides, folder, seeds=drawn, tuning=tuning, tolerance=tolerance)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    command = shlex.join(["gecko", *sys.argv[1:]])
    outcome = run_comparison(plan, jobs=jobs, command=command, console=console)
    if outcome.page is not None:
        console.print(f"page: {outcome.page}")
    if outcome.stopped:
        console.print(f"{outcome.stopped}: saved. Continue with:\n  {command}")
    if outcome.failed:
        raise typer.Exit(1)


def _listed(text: str, kind: Callable[[str], T], option: str) -> tuple[T, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} takes numbers separated by commas; got {text!r}.") from error
