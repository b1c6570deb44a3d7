"""The command ``gecko``. Each module holds one command or a few related ones.

The modules import PyTorch, and the parts of the package that need it, inside their functions: help and version are
printed without importing PyTorch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from gecko.cli import chat, convert, doctor, finetune, generate, plan, serve, states, tokenize, train
from gecko.cli import eval as evaluations
from gecko.cli.common import ErrorReportingGroup, echo
from gecko.runtime.process import __version__

__all__ = ["app", "main"]

_TRAIN, _USE, _FILES, _INSPECT = "Train", "Use and evaluate", "Model files", "Inspect"

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, command in (
    (_TRAIN, tokenize.tokenize),
    (_TRAIN, plan.plan),
    (_TRAIN, train.train),
    (_TRAIN, finetune.finetune),
    (_TRAIN, train.compare),
    (_TRAIN, train.report),
    (_USE, states.read),
    (_USE, generate.generate),
    (_USE, chat.chat),
    (_USE, serve.serve),
    (_FILES, convert.quantize),
    (_FILES, convert.convert),
    (_FILES, convert.export),
    (_FILES, convert.consolidate),
    (_FILES, convert.average),
    (_INSPECT, plan.info),
    (_INSPECT, doctor.doctor),
):
    app.command(rich_help_panel=panel)(command)
app.add_typer(evaluations.app, name="eval", rich_help_panel=_USE)
app.add_typer(states.app, name="state", rich_help_panel=_INSPECT)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"gecko {__version__}")
        raise typer.Exit


@app.callback()
def gecko(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train, evaluate and serve Gecko language models, which read text of any length with a state of constant size.

    **Examples**

        gecko train tiny --out runs/demo

        gecko generate runs/demo --prompt "def main"

        gecko info runs/demo
    """


def main() -> None:
    """Run the command line."""
    app(prog_name="gecko")
