"""How commands end when something is wrong: one message, no traceback, an exit code that says which kind."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

FAILED, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes: an error with a message, Ctrl-C, and a reader of the output that went away."""


class ErrorReportingGroup(TyperGroup):
    """Runs a command and turns the errors of the package into messages; ``--debug`` lets them through."""

    def invoke(self, ctx: Any) -> Any:
        with _ending_cleanly(ctx.params["debug"]), _plain_warnings():
            result = super().invoke(ctx)
            # Here, and not when Python exits, a reader that went away can still be noticed.
            sys.stdout.flush()
            return result


@contextmanager
def _ending_cleanly(debug: bool) -> Iterator[None]:
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whatever is still in the buffer has to go somewhere when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        if debug or not _has_message(error):
            raise
        typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
        typer.echo(_message(error), err=True)
        raise typer.Exit(FAILED) from error


def _has_message(error: Exception) -> bool:
    """Errors that explain themselves; a RuntimeError or TypeError out of a library is a bug and shows where it is."""
    if isinstance(error, RuntimeError | TypeError):
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        raised_by = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
        return str(raised_by).split(".")[0] == "gecko"
    return True


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}."
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line, without the place in the code."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        typer.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
