"""``gecko report``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from gecko.cli.output import output_file


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders, `gecko compare` folders, and files of `gecko eval --out`."),
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="F", help="The page; overwritten.")] = "report.html",
) -> None:
    """One HTML page of runs and evaluations: the paper's figures and tables, its published numbers beside them.

    Runs that differ in nothing but their seed are one model, with mean and interval. A run's folder brings the
    results in its `eval/` along.

    **Example**

        gecko report runs/gecko runs/llama perplexity.json --out report.html
    """
    from gecko.report import write_page

    path = output_file(out)
    material = write_page([Path(run).expanduser() for run in runs], path, shlex.join(["gecko", *sys.argv[1:]]))
    for what, why in material.left_out:
        typer.echo(f"left out: {what}: {why}", err=True)
    typer.echo(f"written to {path}: {len(material.runs)} runs, {len(material.evaluations)} evaluations")
