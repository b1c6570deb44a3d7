"""``gecko tokenize``, ``train``, ``finetune``, ``compare`` and ``report``: from a corpus to runs, and pages of them."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from gecko.cli.command import PAGE, Command, TakesTokenizer, WritesFile, command_line, echo
from gecko.records import argument, option
from gecko.runtime.terminal import Terminal, lasting_output

if TYPE_CHECKING:
    from gecko.data.tokenize import TokenizingPlan
    from gecko.data.tokenizers import Tokenizer
    from gecko.train import Run

T = TypeVar("T")
EXECUTORS = ("local", "slurm", "ray")


class Tokenize(Command):
    """Tokenize a corpus into shards, which training maps from disk.

    After an interruption the same command continues; finished shards are kept. Train on the shards with
    data.source=FOLDER and the same data.tokenizer.

    **Examples**

        gecko tokenize 'books/*.txt' --tokenizer olmo.json --out shards/books

        gecko tokenize dolma --tokenizer olmo.json --out shards/dolma --executor slurm --partition cpu --workers 500
    """

    sources: list[str] = argument("SOURCE...")
    """Files, folders, globs or hf:NAME, as for data.source."""
    out: Path = option(MISSING, metavar="FOLDER")
    """Folder for the shards; it must be new or empty."""
    tokenizer: str = option(MISSING)
    """bytes, a tokenizer's file or folder, or its name on the hub."""
    field: str = "text"
    """Name of the text field in JSON Lines, Parquet and data sets."""
    workers: int | None = option(min=1, show_default="all cores")
    """Shards encoded at the same time."""
    executor: str = "local"
    """Where to run: local, slurm or ray."""
    partition: str | None = None
    """Slurm partition."""
    hours: int = option(12, min=1)
    """Slurm time limit per shard, in hours."""
    allow_loss: bool = False
    """Allow a tokenizer that loses more than 0.1 % of the characters."""
    verify: bool = False
    """Read all shards back and verify their checksums."""

    @lasting_output()
    def run(self) -> None:
        from gecko.data import ShardFolder, load_tokenizer
        from gecko.data.tokenize import TokenizingPlan

        if self.executor not in EXECUTORS:
            raise ValueError(f"--executor must be one of {', '.join(EXECUTORS)}; got {self.executor!r}.")
        if self.executor == "slurm" and self.partition is None:
            raise ValueError("--executor slurm needs the partition to submit to: add --partition NAME.")
        console, tokenizer = Terminal(soft_wrap=True), load_tokenizer(self.tokenizer)
        plan = TokenizingPlan.make(self.sources, tokenizer, self.out, field=self.field)
        plan.start()
        try:
            if len(plan.done()) < len(plan.tasks):
                self.write(plan, tokenizer, console)
            manifest = plan.finish()
        except (OSError, ValueError):
            plan.withdraw()
            raise
        if manifest is None:
            console.print(
                f"{len(plan.done())} of {len(plan.tasks)} shards are there. The same command shows the progress, and "
                "submits missing shards after the job has ended."
            )
            return
        if self.verify:
            ShardFolder.open(plan.folder).verify()
            console.print("every byte is as it was written")
        documents, tokens, text_bytes = (
            sum(getattr(shard, name) for shard in manifest.shards) for name in ("documents", "tokens", "text_bytes")
        )
        console.print(
            f"{plan.folder}: {len(manifest.shards):,} shards, {documents:,} documents, {tokens:,} tokens of "
            f"{manifest.tokenizer.dtype.name}, {text_bytes:,} bytes of text ({text_bytes / tokens:.2f} per token)\n"
            f"Train on them with: data.source={shlex.quote(str(plan.folder))} data.tokenizer={manifest.tokenizer.name}"
        )

    def write(self, plan: TokenizingPlan, tokenizer: Tokenizer, console: Console) -> None:
        """Write the missing shards, or submit a job that does."""
        from gecko.cli.arguments import ShardProgress
        from gecko.data.sources import sample_texts
        from gecko.data.text_stream import SAMPLE, check_loss
        from gecko.data.tokenize import RUN_FOLDER, run_here, run_on_ray, run_on_slurm, unfinished_slurm_job

        parts = [part for task in plan.tasks for part in task.parts]
        if told := check_loss(tokenizer, sample_texts(parts, SAMPLE), allowed=self.allow_loss):
            console.print(told)
        if self.executor == "slurm":
            status = f"Slurm job {(job := unfinished_slurm_job(plan))} has not ended"
            if job is None:  # two jobs would write the same files
                workers, partition = self.workers or len(plan.tasks), self.partition or ""
                status = f"submitted as Slurm job {run_on_slurm(plan, workers, partition=partition, hours=self.hours)}"
            console.print(f"{status}; its logs are in {plan.folder / RUN_FOLDER}")
            return
        with ShardProgress(plan, console):
            if self.executor == "ray":
                run_on_ray(plan, self.workers or len(plan.tasks))
            else:
                for _ in run_here(plan, tokenizer, self.workers or os.cpu_count() or 1):
                    pass


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
            from gecko.recipes import RECIPES

            about = ((name, inspect.getdoc(recipe) or "") for name, recipe in RECIPES.items())
            _print_aligned(((name, text.partition("\n")[0].replace("``", "")) for name, text in about), 20)
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
            for line in replayed(run, self.replay):
                echo(line)
        else:
            train(run, resume=self.resume, begin=begin)


def _print_aligned(rows: Iterable[tuple[str, str]], width: int) -> None:
    """Print a name of up to ``width`` characters and its meaning per line; on a terminal the meaning is wrapped."""
    if not sys.stdout.isatty():
        for name, meaning in rows:
            echo(f"{name:<{width - 1}} {meaning}")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, meaning in rows:
        table.add_row(name, meaning)
    Terminal().print(table)


class Finetune(TakesTokenizer):
    """Fine-tune a model on chats.

    The model learns the assistant's answers; it only reads the other messages. Chats are packed into rows, and the
    state is reset between them. Up to 5 % of the answers are held out. The folder gets what `gecko train` writes; every
    checkpoint is a model with its chat template, which `gecko chat` and `gecko serve` use.

    **Examples**

        gecko finetune runs/demo chats.jsonl --out runs/chat

        gecko finetune runs/demo chats.jsonl --lora 16 --epochs 5 --out runs/adapted

        gecko finetune runs/demo chats.jsonl optimizer.learning_rate=1e-4 --out runs/slow

        gecko chat runs/chat
    """

    chats: str = argument("CHATS")
    """JSON Lines, one chat a line: {"messages": [{"role": "user", "content": "…"}, …]}."""
    overrides: list[str] = argument("KEY=VALUE...", [])
    """Changes to the recipe's fields."""
    out: str | None = option(metavar="FOLDER")
    """Folder of the new run."""
    lora: int | None = option(metavar="RANK", min=1, show_default="all parameters")
    """Train adapters (LoRA) of this rank."""
    epochs: float | None = option(show_default="3")
    """Number of times that each chat is read. With --resume: in all, for another number than before."""
    resume: bool = False
    """Continue from the newest checkpoint; start if there is none."""

    def run(self) -> None:
        begin = time.perf_counter()
        from gecko.parallel.mesh import only_first_rank_reports
        from gecko.train import train

        if not self.out:
            raise ValueError("--out must name the folder of the new run, for example --out runs/chat; got none.")
        if any((given := override).startswith("epochs=") for override in self.overrides):
            raise ValueError(f"epochs are an option, no setting of the recipe; got {given}. Try --epochs {given[7:]}")
        with only_first_rank_reports():
            run = self.recipe(self.out)
        if train(run, resume=self.resume, begin=begin).finished:
            echo(f"talk with it: gecko chat {shlex.quote(self.out)}")

    def recipe(self, out: str) -> Run:
        """Return the run to train; one that is resumed has the recipe that it was begun with."""
        from gecko.cli.arguments import find_model
        from gecko.recipes import apply_overrides, get_recipe
        from gecko.recipes.finetune import finetuning_run, with_epochs

        folder, begun = find_model(self.model), Path(out).expanduser() / "recipe.json"
        if not (self.resume and begun.is_file()):
            return finetuning_run(
                folder, self.chats, output=out, tokenizer=self.tokenizer, lora_rank=self.lora,
                epochs=3 if self.epochs is None else self.epochs, overrides=self.overrides,
            )  # fmt: skip
        run = apply_overrides(get_recipe(str(begun)), self.overrides)
        # A run that was resumed has a newer checkpoint.
        same_run = run.init_from is not None and Path(run.init_from).parent == folder.parent
        for name, begun_with, given in (
            ("MODEL", run.init_from, run.init_from if same_run else str(folder)),
            ("CHATS", run.data.source, self.chats),
            ("--tokenizer", run.data.tokenizer, self.tokenizer or run.data.tokenizer),
            ("--lora", run.lora_rank, self.lora),
        ):
            if given != begun_with:
                raise ValueError(
                    f"{name} must be what the run in {run.folder} was begun with, {begun_with}; got {given}. Leave "
                    "it as it was, or start a new run with another --out."
                )
        if self.epochs is None or run.steps is None or any(given.startswith("steps=") for given in self.overrides):
            return run
        return with_epochs(run, self.epochs)


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
        overrides = [argument for argument in self.arguments if re.match(r"[a-z_][a-z0-9_.]*=", argument)]
        recipes = [argument for argument in self.arguments if argument not in overrides]
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
        console, command = Terminal(soft_wrap=True), command_line()
        outcome = compare(plan, jobs=self.jobs, command=command, console=console)
        if outcome.page is not None:
            console.print(f"page: {outcome.page}")
        if outcome.stopped:
            console.print(f"{outcome.stopped}: saved. Continue with:\n  {command}")
        if outcome.failed:
            raise typer.Exit(1)


def _listed(text: str, kind: Callable[[str], T], option: str) -> tuple[T, ...]:
    try:
        return tuple(map(kind, text.split(",")))
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
