"""``gecko train``, ``gecko compare`` and ``gecko report``: train a model, compare recipes, show runs on a page."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from gecko.cli.common import PAGE, Force, Overrides, echo, output_file


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

        torchrun --nproc-per-node=8 --max-restarts=3 -m gecko train gecko_15m gradient_accumulation_steps=2 --resume

        gecko train runs/demo/recipe.json --replay 117
    """
    begin = time.perf_counter()
    if show_list:
        _list_recipes()
        return
    from gecko.parallel.mesh import only_first_rank_reports
    from gecko.recipes import apply_overrides, get_recipe, shown
    from gecko.train import replayed
    from gecko.train import train as run_training

    with only_first_rank_reports():
        if recipe is None:
            raise ValueError("RECIPE must be named, for example: gecko train tiny. `gecko train --list` shows all.")
        changes = [*(overrides or []), *([] if out is None else [f"output={out}"])]
        run = apply_overrides(get_recipe(recipe), changes)
    if show:
        _print_aligned(shown(run), 35)
    elif replay is not None:
        _print(replayed(run, replay))
    else:
        run_training(run, resume=resume, begin=begin)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        echo(line)


def _print_aligned(rows: Iterable[tuple[str, str]], width: int) -> None:
    """Print a name of up to ``width`` characters and its meaning per line; on a terminal the meaning is wrapped."""
    if not sys.stdout.isatty():
        _print(f"{name:<{width - 1}} {meaning}" for name, meaning in rows)
        return
    from rich.table import Table

    from gecko.runtime.terminal import Terminal

    table = Table.grid(padding=(0, 2, 0, 0))
    for name, meaning in rows:
        table.add_row(name, meaning)
    Terminal().print(table)


def _list_recipes() -> None:
    from gecko.recipes import RECIPES

    about = {name: inspect.getdoc(recipe) or "" for name, recipe in RECIPES.items()}
    _print_aligned([(name, text.partition("\n")[0].replace("``", "")) for name, text in about.items()], 20)


T = TypeVar("T")
_OVERRIDE = re.compile(r"[a-z_][a-z0-9_.]*=")


def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... KEY=VALUE...",
            help="Recipes, by name or recipe.json (the others are compared with the first), and changes to all of "
            "their fields.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for the runs and the results.")],
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds; each recipe is trained once per seed.")] = "0",
    learning_rates: Annotated[
        str | None,
        typer.Option(
            "--learning-rates", metavar="A,B,C", help="Learning rates to try first, in short runs of each recipe."
        ),
    ] = None,
    tuning_steps: Annotated[
        int | None, typer.Option("--tuning-steps", metavar="N", help="Steps of each short run.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Largest relative difference between numbers of parameters.")
    ] = 0.02,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs trained at the same time, each in its own process.")] = 1,
) -> None:
    """Train several recipes on the same data and compare their losses.

    All runs read the same texts in the same order, with the same schedule; only models, optimizers and learning rates
    differ. Ctrl-C and SIGTERM save before they stop; the same command continues. The folder receives a page with
    pictures (comparison.html), all numbers (comparison.json), and one folder per run.

    **Examples**

        gecko compare compare_gecko compare_llama data.source='books/train/*.txt'
        data.validation='books/test/*.txt' --seeds 0,1,2 --jobs 2 --out runs/compare

        gecko compare compare_gecko compare_llama --learning-rates 2e-3,4e-3,8e-3 --tuning-steps 244 --out runs/tuned
    """
    from gecko.experiments.compare import Plan, Tuning, check_packages
    from gecko.experiments.compare import compare as run_comparison
    from gecko.runtime.terminal import Terminal

    check_packages()
    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    recipes = [argument for argument in arguments if not _OVERRIDE.match(argument)]
    if (learning_rates is None) != (tuning_steps is None):
        raise ValueError(
            "--learning-rates and --tuning-steps go together, such as --learning-rates 2e-3,4e-3 --tuning-steps 244."
        )
    tuning = None
    if learning_rates is not None and tuning_steps is not None:
        tuning = Tuning(_listed(learning_rates, float, "--learning-rates"), tuning_steps)
    folder, drawn = out.expanduser(), _listed(seeds, int, "--seeds")
    plan = Plan.of(recipes, overrides, folder, seeds=drawn, tuning=tuning, tolerance=tolerance)
    console = Terminal(soft_wrap=True)
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


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Folders of runs and of `gecko compare`, and files of `gecko eval --out`."
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="F", help="File for the page; an earlier page is replaced.")
    ] = "report.html",
    force: Force = False,
) -> None:
    """Write an HTML page of runs and evaluations: the paper's figures and tables, with its published numbers.

    Runs that differ only in their seed are shown as one model, with mean and interval. The results in the `eval/`
    folder of a run are shown too.

    **Example**

        gecko report runs/gecko runs/llama perplexity.json --out report.html
    """
    from gecko.experiments.report import write_page

    path = output_file(out, PAGE, inputs=runs, force=force)
    material = write_page([Path(run).expanduser() for run in runs], path, shlex.join(["gecko", *sys.argv[1:]]))
    for what, why in material.left_out:
        echo(f"left out: {what}: {why}", err=True)
    echo(f"written to {path}: {len(material.runs)} runs, {len(material.evaluations)} evaluations")
