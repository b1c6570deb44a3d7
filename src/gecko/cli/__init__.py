"""The command ``gecko``: its commands, and its errors. Each module holds a few related commands.

A command that fails prints one message without a traceback; the exit code says which kind of failure it was.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gecko.cli.chat import Chat
from gecko.cli.command import BROKEN_PIPE, FAILED, INTERRUPTED, Command, echo, function_of
from gecko.cli.convert import Average, Consolidate, Convert, Distill, Export, Quantize
from gecko.cli.describe import Diff, Doctor, Info, Show
from gecko.cli.eval import Academic, Diagnose, Perplexity, Positions, Retrieval, Scrolls, Speed
from gecko.cli.generate import Generate, Read, Serve
from gecko.cli.plan import PlanTraining
from gecko.cli.train import Compare, Finetune, Report, Tokenize, Train
from gecko.runtime.process import __version__
from gecko.runtime.terminal import lasting_messages, visible

__all__ = ["app", "main"]


class ErrorReportingGroup(TyperGroup):
    """Command group that prints errors as messages; with ``--debug`` they are raised."""

    def invoke(self, ctx: Any) -> Any:
        with lasting_messages(), _errors_as_messages(ctx), _warnings_as_messages():
            result = super().invoke(ctx)
            # A closed pipe can be handled here, but no longer when Python exits.
            if sys.stdout is not None:  # it was closed when Python started
                sys.stdout.flush()
            return result


@contextmanager
def _errors_as_messages(ctx: Any) -> Iterator[None]:
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Python flushes the rest of the buffer when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except (ValueError, TypeError, OSError, ImportError, MemoryError, RuntimeError) as error:
        if ctx.params["debug"] or not _has_message(error):
            raise
        typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
        echo(_message(error), err=True)
        raise typer.Exit(FAILED) from error
    except Exception as error:
        _explain_usage(error, ctx.invoked_subcommand)
        raise


_WITH_SETTINGS = ("train", "finetune", "plan", "compare")
"""Commands that take ``KEY=VALUE``."""


def _explain_usage(usage: Any, command: str) -> None:
    """Say what typer leaves out: the value that an option refuses, and that ``--steps 50`` is written ``steps=50``."""
    if hasattr(usage, "possibilities") and command in _WITH_SETTINGS:
        usage.message += f". {_how_to_write(usage.option_name)}"
    elif hasattr(usage, "param_hint") and hasattr(usage.__cause__, "errors"):
        usage.message += f"; got {usage.__cause__.errors()[0]['input']!r}."
    if isinstance(getattr(usage, "message", None), str):
        usage.message = visible(usage.message)


def _how_to_write(option: str) -> str:
    """Say how the setting is written that an unknown option means: ``--lr`` is ``optimizer.learning_rate=VALUE``."""
    from gecko.recipes import RECIPES, shown
    from gecko.train.settings import ELSEWHERE

    name = option.lstrip("-").replace("-", "_")
    name = ELSEWHERE.get(name, name)
    settings = [setting.partition("=")[0] for setting, _ in shown(RECIPES["tiny"]())]
    meant = next((setting for setting in settings if setting == name or setting.endswith(f".{name}")), None)
    if meant is None:
        return "Settings of the recipe are written KEY=VALUE; `gecko train RECIPE --show` lists them."
    return f"A setting of the recipe is written {meant}=VALUE, without dashes."


_NO_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)
"""Texts in PyTorch's errors of missing memory, on a CPU and on a GPU."""


def _has_message(error: Exception) -> bool:
    """Return whether the error is written for users. A RuntimeError or TypeError raised in a library is a bug."""
    if not isinstance(error, RuntimeError | TypeError) or _NO_MEMORY.search(str(error)):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__")).split(".")[0] == "gecko"


def _message(error: Exception) -> str:
    if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
        size = re.search(r"(?:allocate) ([\d.]+ \w+)", str(error))
        return (
            f"the work must fit into memory; an allocation{f' of {size[1]}' if size else ''} failed. "
            "Try smaller or fewer rows, or a smaller model."
        )
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        return f"{error.filename} must be a folder, or a path in one; a file has this name. Name another."
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}."
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


@contextmanager
def _warnings_as_messages() -> Iterator[None]:
    """Print warnings as one line, without the place in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        with suppress(OSError):  # the reader of the output may be gone
            echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


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
_COMMANDS: list[tuple[typer.Typer, str | None, dict[str, type[Command]]]] = [
    (app, "Train", {
        "tokenize": Tokenize, "plan": PlanTraining, "train": Train, "finetune": Finetune, "compare": Compare,
        "report": Report,
    }),
    (app, "Use and evaluate", {"read": Read, "generate": Generate, "chat": Chat, "serve": Serve}),
    (app, "Model files", {
        "quantize": Quantize, "convert": Convert, "distill": Distill, "export": Export, "consolidate": Consolidate,
        "average": Average,
    }),
    (app, "Inspect", {"info": Info, "doctor": Doctor}),
    (evaluations, None, {
        "perplexity": Perplexity, "positions": Positions, "retrieval": Retrieval, "diagnose": Diagnose,
        "speed": Speed, "academic": Academic, "scrolls": Scrolls,
    }),
    (states, None, {"show": Show, "diff": Diff}),
]  # fmt: skip
"""Commands by name, with their group and their panel of the help."""
for group, panel, commands in _COMMANDS:
    for name, kind in commands.items():
        group.command(rich_help_panel=panel)(function_of(kind, name))
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
