"""The command ``gecko``. Each module holds one command or a few related ones.

The modules import PyTorch, and the parts of the package that need it, inside their functions: help and version are
printed without importing PyTorch.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from gecko.cli.command import Command, function_of
from gecko.cli.common import ErrorReportingGroup, echo
from gecko.cli.convert import Average, Consolidate, Convert, Distill, Export, Quantize
from gecko.cli.doctor import Doctor
from gecko.cli.eval import Academic, Diagnose, Perplexity, Positions, Retrieval, Scrolls, Speed
from gecko.cli.generate import Chat, Generate, Serve
from gecko.cli.plan import Info, PlanTraining
from gecko.cli.states import Diff, Read, Show
from gecko.cli.tokenize import Tokenize
from gecko.cli.train import Compare, Finetune, Report, Train
from gecko.runtime.process import __version__

__all__ = ["app", "main"]

_COMMANDS: dict[str, dict[str, type[Command]]] = {
    "Train": {
        "tokenize": Tokenize, "plan": PlanTraining, "train": Train, "finetune": Finetune, "compare": Compare,
        "report": Report,
    },
    "Use and evaluate": {"read": Read, "generate": Generate, "chat": Chat, "serve": Serve},
    "Model files": {
        "quantize": Quantize, "convert": Convert, "distill": Distill, "export": Export, "consolidate": Consolidate,
        "average": Average,
    },
    "Inspect": {"info": Info, "doctor": Doctor},
}  # fmt: skip
"""Commands by name, in the panels of the help."""
_EVALUATIONS: dict[str, type[Command]] = {
    "perplexity": Perplexity, "positions": Positions, "retrieval": Retrieval, "diagnose": Diagnose,
    "speed": Speed, "academic": Academic, "scrolls": Scrolls,
}  # fmt: skip
_STATES: dict[str, type[Command]] = {"show": Show, "diff": Diff}


def _add(group: typer.Typer, commands: dict[str, type[Command]], panel: str | None = None) -> None:
    for name, kind in commands.items():
        group.command(rich_help_panel=panel)(function_of(kind, name))


app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
evaluations = typer.Typer(
    no_args_is_help=True, help="Evaluate a model. Every number is reported with its sample size and a 95 % interval."
)
states = typer.Typer(no_args_is_help=True, help="Show and compare reading states.")
for panel, commands in _COMMANDS.items():
    _add(app, commands, panel)
_add(evaluations, _EVALUATIONS)
_add(states, _STATES)
app.add_typer(evaluations, name="eval", rich_help_panel="Use and evaluate")
app.add_typer(states, name="state", rich_help_panel="Inspect")


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
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed before Python started: a file of a model must not take its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    try:
        app(prog_name="gecko")
    except OSError as error:  # help or the version, where nothing can be printed; commands tell their own errors
        if "--debug" in sys.argv:
            raise
        sys.exit(f"error: {error}")
