"""``gecko tokenize``: write a corpus as token shards."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gecko.data.shards import Manifest
    from gecko.data.tokenize import TokenizingPlan
    from gecko.data.tokenizers import Tokenizer

EXECUTORS = ("local", "slurm", "ray")
REFRESH_SECONDS = 0.5


def tokenize(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="Files, folders, globs or hf:NAME, as for data.source."),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder for the shards; it must be new or empty.")
    ],
    tokenizer: Annotated[str, typer.Option(help="bytes, a tokenizer's file or folder, or its name on the hub.")],
    field: Annotated[str, typer.Option(help="Name of the text field in JSON Lines, Parquet and data sets.")] = "text",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Shards encoded at the same time.", show_default="all cores")
    ] = None,
    executor: Annotated[str, typer.Option(help="Where to run: local, slurm or ray.")] = "local",
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    hours: Annotated[int, typer.Option(min=1, help="Slurm time limit per shard, in hours.")] = 12,
    allow_loss: Annotated[
        bool, typer.Option("--allow-loss", help="Allow a tokenizer that loses more than 0.1 % of the characters.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read all shards back and verify their checksums.")] = False,
) -> None:
    """Tokenize a corpus into shards, which training maps from disk.

    After an interruption the same command continues; finished shards are kept. Train on the shards with
    data.source=FOLDER and the same data.tokenizer.

    **Examples**

        gecko tokenize 'books/*.txt' --tokenizer olmo.json --out shards/books

        gecko tokenize dolma --tokenizer olmo.json --out shards/dolma --executor slurm --partition cpu --workers 500
    """
    from gecko.data import ShardFolder, load_tokenizer
    from gecko.data.sources import sample_texts
    from gecko.data.token_bytes import SAMPLE, check_loss
    from gecko.data.tokenize import TokenizingPlan
    from gecko.runtime.terminal import Terminal

    if executor not in EXECUTORS:
        raise ValueError(f"--executor must be one of {', '.join(EXECUTORS)}; got {executor!r}.")
    if executor == "slurm" and partition is None:
        raise ValueError("--executor slurm needs the partition to submit to: add --partition NAME.")
    console = Terminal(soft_wrap=True)
    out = out.expanduser()
    loaded = load_tokenizer(tokenizer)
    plan = TokenizingPlan.make(sources, loaded, out, field=field)
    plan.start()
    try:
        if len(plan.done()) < len(plan.tasks):
            parts = [part for task in plan.tasks for part in task.parts]
            if told := check_loss(loaded, sample_texts(parts, SAMPLE), allowed=allow_loss):
                console.print(told)
        _run(plan, loaded, executor, workers, partition or "", hours, console)
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
    if verify:
        ShardFolder.open(out).verify()
        console.print("every byte is as it was written")
    _report(manifest, plan, console)


def _run(
    plan: TokenizingPlan, tokenizer: Tokenizer, executor: str, workers: int | None, partition: str, hours: int,
    console: Console,
) -> None:  # fmt: skip
    from gecko.data.executors import run_here, run_on_ray

    if len(plan.done()) == len(plan.tasks):
        return
    if executor == "slurm":
        _submit(plan, workers or len(plan.tasks), partition, hours, console)
        return
    with _progress(plan, console):
        if executor == "ray":
            run_on_ray(plan, workers or len(plan.tasks))
        else:
            for _ in run_here(plan, tokenizer, workers or os.cpu_count() or 1):
                pass


def _submit(plan: TokenizingPlan, workers: int, partition: str, hours: int, console: Console) -> None:
    """Submit the missing shards to Slurm, unless an earlier job is still running: two would write the same files."""
    from gecko.data.executors import RUN_FOLDER, run_on_slurm, unfinished_slurm_job

    job = unfinished_slurm_job(plan)
    if job is not None:
        status = f"Slurm job {job} has not ended"
    else:
        status = f"submitted as Slurm job {run_on_slurm(plan, workers, partition=partition, hours=hours)}"
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
                size += _size(entry)
    return records, size // plan.tokenizer.dtype.itemsize


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0
