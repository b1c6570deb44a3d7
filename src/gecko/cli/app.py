"""The command ``gecko``, put together from its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from gecko.cli.compare import compare
from gecko.cli.consolidate import consolidate
from gecko.cli.convert import convert
from gecko.cli.doctor import doctor
from gecko.cli.errors import ErrorReportingGroup
from gecko.cli.eval import app as eval_app
from gecko.cli.generate import generate
from gecko.cli.info import info
from gecko.cli.plan import plan
from gecko.cli.quantize import quantize
from gecko.cli.read import read
from gecko.cli.report import report
from gecko.cli.serve import serve
from gecko.cli.state import app as state_app
from gecko.cli.tokenize import tokenize
from gecko.cli.train import train
from gecko.version import __version__

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    tokenize,
    plan,
    train,
    compare,
    report,
    read,
    generate,
    serve,
    quantize,
    convert,
    consolidate,
    info,
    doctor,
):
    app.command()(command)
app.add_typer(state_app, name="state")
app.add_typer(eval_app, name="eval")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gecko {__version__}")
        raise typer.Exit


@app.callback()
def gecko(
    debug: Annotated[bool, typer.Option("--debug", help="Show where in the code an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Gecko language models: they read text of any length with a state of constant size.

    Train one, let it write, look at what it is made of:

        gecko train tiny --out runs/demo

        gecko generate runs/demo --prompt "def main"

        gecko info runs/demo
    """


def main() -> None:
    """What the command ``gecko`` runs."""
    app(prog_name="gecko")
