"""``gecko tokenize``: write a corpus as token shards."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from rich.console import Console

from gecko.cli.command import Command
from gecko.records import argument, option
from gecko.runtime.terminal import Terminal, lasting_output

if TYPE_CHECKING:
    from gecko.data.shards import Manifest
    from gecko.data.tokenize import TokenizingPlan
    from gecko.data.tokenizers import Tokenizer

EXECUTORS = ("local", "slurm", "ray")
REFRESH_SECONDS = 0.5


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
        console = Terminal(soft_wrap=True)
        tokenizer = load_tokenizer(self.tokenizer)
        plan = TokenizingPlan.make(self.sources, tokenizer, self.out, field=self.field)
        plan.start()
        try:
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
        _report(manifest, plan, console)

    def write(self, plan: TokenizingPlan, tokenizer: Tokenizer, console: Console) -> None:
        """Write the missing shards, or submit a job that does."""
        from gecko.data.sources import sample_texts
        from gecko.data.text_stream import SAMPLE, check_loss
        from gecko.data.tokenize import run_here, run_on_ray

        if len(plan.done()) == len(plan.tasks):
            return
        parts = [part for task in plan.tasks for part in task.parts]
        if told := check_loss(tokenizer, sample_texts(parts, SAMPLE), allowed=self.allow_loss):
            console.print(told)
        if self.executor == "slurm":
            self.submit(plan, console)
            return
        with _progress(plan, console):
            if self.executor == "ray":
                run_on_ray(plan, self.workers or len(plan.tasks))
            else:
                for _ in run_here(plan, tokenizer, self.workers or os.cpu_count() or 1):
                    pass

    def submit(self, plan: TokenizingPlan, console: Console) -> None:
        """Submit the missing shards to Slurm, unless an earlier job still runs: two would write the same files."""
        from gecko.data.tokenize import RUN_FOLDER, run_on_slurm, unfinished_slurm_job

        status = f"Slurm job {(job := unfinished_slurm_job(plan))} has not ended"
        if job is None:
            workers, partition = self.workers or len(plan.tasks), self.partition or ""
            status = f"submitted as Slurm job {run_on_slurm(plan, workers, partition=partition, hours=self.hours)}"
        console.print(f"{status}; its logs are in {plan.folder / RUN_FOLDER}")


def _report(manifest: Manifest, plan: TokenizingPlan, console: Console) -> None:
    tokens, text_bytes = (sum(getattr(shard, name) for shard in manifest.shards) for name in ("tokens", "text_bytes"))
    documents = sum(shard.documents for shard in manifest.shards)
    console.print(
        f"{plan.folder}: {len(manifest.shards):,} shards, {documents:,} documents, {tokens:,} tokens of "
        f"{manifest.tokenizer.dtype.name}, {text_bytes:,} bytes of text ({text_bytes / tokens:.2f} per token)"
    )
    console.print(
        f"Train on them with: data.source={shlex.quote(str(plan.folder))} data.tokenizer={manifest.tokenizer.name}"
    )


@contextmanager
def _progress(plan: TokenizingPlan, console: Console) -> Iterator[None]:
    """Show the number of finished shards and of tokens on disk, computed from the sizes of the files."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    ended = Event()
    columns = (
        TextColumn("tokenizing"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("shards"),
        TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("tokenizing", total=len(plan.tasks), tokens="-")

        def refresh() -> None:
            # Listing thousands of files takes long, so large corpora are refreshed less often.
            while not ended.wait(REFRESH_SECONDS * (1 + len(plan.tasks) // 1000)):
                shards, tokens = _on_disk(plan)
                progress.update(bar, completed=shards, tokens=f"{tokens:,}")

        thread = Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            shards, tokens = _on_disk(plan)
            progress.update(bar, completed=shards, tokens=f"{tokens:,}")


def _on_disk(plan: TokenizingPlan) -> tuple[int, int]:
    """Return the number of finished shards, and of tokens in all shards including unfinished ones."""
    size, records = 0, 0
    with os.scandir(plan.folder) as entries:
        for entry in entries:
            # NAME.ds, or .NAME.ds.SUFFIX while it is written.
            kind = entry.name.lstrip(".").split(".")[1:]
            records += kind == ["json"] and entry.name[0].isdigit()
            if kind[:1] == ["ds"] and kind[1:2] not in (["index"], ["bytes"]):
                with suppress(FileNotFoundError):  # it was renamed meanwhile
                    size += entry.stat().st_size
    return records, size // plan.tokenizer.dtype.itemsize
