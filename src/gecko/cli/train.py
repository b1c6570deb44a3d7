"""``gecko train``, ``gecko compare`` and ``gecko report``: train a model, compare recipes, show runs on a page."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from pathlib import Path
from typing import TypeVar

import typer
from rich.table import Table

from gecko.cli.command import Command, WritesFile
from gecko.cli.common import PAGE, command_line, echo
from gecko.records import argument, option
from gecko.runtime.terminal import Terminal


class Train(Command):
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

    recipe: str | None = argument("RECIPE", None)
    """Name of a recipe, or path of a run's recipe.json."""
    overrides: list[str] = argument("KEY=VALUE...", [])
    """Changes to the recipe's fields."""
    resume: bool = False
    """Continue from the newest checkpoint; start from scratch if there is none."""
    out: str | None = option(metavar="FOLDER")
    """Folder of the run; short for output=FOLDER."""
    replay: int | None = option(metavar="STEP")
    """Print the text that the model reads in this step, and exit."""
    show: bool = False
    """Print every setting with its value and meaning, and exit."""
    show_list: bool = option(False, "--list")
    """List the recipes and exit."""

    def run(self) -> None:
        begin = time.perf_counter()
        if self.show_list:
            _list_recipes()
            return
        from gecko.parallel.mesh import only_first_rank_reports
        from gecko.recipes import apply_overrides, get_recipe, shown
        from gecko.train import replayed, train

        with only_first_rank_reports():
            if self.recipe is None:
                raise ValueError("RECIPE must be named, for example: gecko train tiny. `gecko train --list` shows all.")
            output = [] if self.out is None else [f"output={self.out}"]
            run = apply_overrides(get_recipe(self.recipe), [*self.overrides, *output])
        if self.show:
            _print_aligned(shown(run), 35)
        elif self.replay is not None:
            _print(replayed(run, self.replay))
        else:
            train(run, resume=self.resume, begin=begin)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        echo(line)


def _print_aligned(rows: Iterable[tuple[str, str]], width: int) -> None:
    """Print a name of up to ``width`` characters and its meaning per line; on a terminal the meaning is wrapped."""
    if not sys.stdout.isatty():
        _print(f"{name:<{width - 1}} {meaning}" for name, meaning in rows)
        return

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


class Compare(Command):
    """Train several recipes, or one with several values of a setting, on the same data and compare their losses.

    All runs read the same texts in the same order, with the same schedule; only models, optimizers and learning rates
    differ. Ctrl-C and SIGTERM save before they stop; the same command continues. The folder receives a page with
    pictures (comparison.html), all numbers (comparison.json), and one folder per run.

    **Examples**

        gecko compare compare_gecko compare_llama data.source='books/train/*.txt'
        data.validation='books/test/*.txt' --seeds 0,1,2 --jobs 2 --out runs/compare

        gecko compare tiny 'model.chunk_size=32|64' steps=400 --out runs/chunks

        gecko compare compare_gecko compare_llama --learning-rates 2e-3,4e-3,8e-3 --tuning-steps 244 --out runs/tuned
    """

    arguments: list[str] = argument("RECIPE... KEY=VALUE...")
    """Recipes, by name or recipe.json (the others are compared with the first), and changes to all of their fields;
    KEY='A|B' compares two values."""
    out: Path = option(MISSING, metavar="FOLDER")
    """Folder for the runs and the results."""
    seeds: str = "0"
    """Seeds; each recipe is trained once per seed."""
    learning_rates: str | None = option(metavar="A,B,C")
    """Learning rates to try first, in short runs of each recipe."""
    tuning_steps: int | None = option(metavar="N")
    """Steps of each short run."""
    tolerance: float = 0.02
    """Largest relative difference between numbers of parameters."""
    jobs: int = 1
    """Runs trained at the same time, each in its own process."""

    def run(self) -> None:
        from gecko.experiments.compare import ComparisonPlan, Tuning, check_packages, compare

        check_packages()
        overrides = [argument for argument in self.arguments if _OVERRIDE.match(argument)]
        recipes = [argument for argument in self.arguments if not _OVERRIDE.match(argument)]
        if (self.learning_rates is None) != (self.tuning_steps is None):
            raise ValueError(
                "--learning-rates and --tuning-steps go together, such as --learning-rates 2e-3,4e-3 --tuning-steps "
                "244."
            )
        tuning = None
        if self.learning_rates is not None and self.tuning_steps is not None:
            tuning = Tuning(_listed(self.learning_rates, float, "--learning-rates"), self.tuning_steps)
        seeds = _listed(self.seeds, int, "--seeds")
        plan = ComparisonPlan.of(recipes, overrides, self.out, seeds=seeds, tuning=tuning, tolerance=self.tolerance)
        console = Terminal(soft_wrap=True)
        command = command_line()
        outcome = compare(plan, jobs=self.jobs, command=command, console=console)
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


class Report(WritesFile):
    """Write an HTML page of runs and evaluations: the paper's figures and tables, with its published numbers.

    Runs that differ only in their seed are shown as one model, with mean and interval. The results in the `eval/`
    folder of a run are shown too.

    **Example**

        gecko report runs/gecko runs/llama perplexity.json --out report.html
    """

    runs: list[str] = argument("RUN...", reads=True)
    """Folders of runs and of `gecko compare`, and files of `gecko eval --out`."""
    out: str = option("report.html", "--out", "-o", metavar="F")
    """File for the page; an earlier page is replaced."""

    def run(self) -> None:
        from gecko.experiments.report import write_page

        path = self.output_file(self.out, PAGE)
        material = write_page([Path(run).expanduser() for run in self.runs], path, command_line())
        for what, why in material.left_out:
            echo(f"left out: {what}: {why}", err=True)
        echo(f"written to {path}: {len(material.runs)} runs, {len(material.evaluations)} evaluations")
