"""Shared by the commands: errors, exit codes, and the rule for files they write.

A command that fails prints one message without a traceback; the exit code says which kind of failure it was.

A command replaces an existing file if the file is empty or of the kind that the command writes; it replaces any other
file only with ``--force``. It never replaces a file that it reads, except the reading state that it continues: it reads
the whole state first and then replaces it by the new one.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import typer
from typer.core import TyperGroup

from gecko.runtime.terminal import lasting_messages, visible

FAILED, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes: an error with a message, Ctrl-C, and an output pipe that was closed by its reader."""


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a text of any origin, which cannot control the terminal."""
    typer.echo(visible(text), err=err)


def speed(verb: str, tokens: int, seconds: float, note: str = "") -> str:
    """Return how long tokens took, such as ``read 10 tokens in 0.02 s, 522 tokens/s``."""
    return f"{verb} {tokens:,} tokens{note} in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"


def command_line() -> str:
    """Return this command as a shell takes it."""
    return shlex.join(["gecko", *sys.argv[1:]])


class ErrorReportingGroup(TyperGroup):
    """Command group that prints errors as messages; with ``--debug`` they are raised."""

    def invoke(self, ctx: Any) -> Any:
        debug = ctx.params["debug"]
        with lasting_messages(), _errors_as_messages(debug), _warnings_as_messages(), _usage_errors_explained(ctx):
            result = super().invoke(ctx)
            # A closed pipe can be handled here, but no longer when Python exits.
            if sys.stdout is not None:  # it was closed when Python started
                sys.stdout.flush()
            return result


@contextmanager
def _errors_as_messages(debug: bool) -> Iterator[None]:
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
        if debug or not _has_message(error):
            raise
        typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
        echo(_message(error), err=True)
        raise typer.Exit(FAILED) from error


_WITH_SETTINGS = ("train", "finetune", "plan", "compare")
"""Commands that take ``KEY=VALUE``."""


@contextmanager
def _usage_errors_explained(ctx: Any) -> Iterator[None]:
    """Say what typer leaves out: the value that an option refuses, and that ``--steps 50`` is written ``steps=50``."""
    try:
        yield
    except Exception as error:
        usage: Any = error
        if hasattr(error, "possibilities") and ctx.invoked_subcommand in _WITH_SETTINGS:
            usage.message += f". {_how_to_write(usage.option_name)}"
        elif hasattr(error, "param_hint") and hasattr(error.__cause__, "errors"):
            refused: Any = error.__cause__
            usage.message += f"; got {refused.errors()[0]['input']!r}."
        if isinstance(getattr(error, "message", None), str):
            usage.message = visible(usage.message)
        raise


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


def _has_message(error: Exception) -> bool:
    """Return whether the error is written for users. A RuntimeError or TypeError raised in a library is a bug."""
    if isinstance(error, RuntimeError | TypeError) and not _NO_MEMORY.search(str(error)):
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        raised_by = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
        return str(raised_by).split(".")[0] == "gecko"
    return True


_NO_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)
"""Texts in PyTorch's errors of missing memory, on a CPU and on a GPU."""


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

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        with suppress(OSError):  # the reader of the output may be gone
            echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


class Kind(NamedTuple):
    """Kind of file that commands write."""

    name: str
    recognises: Callable[[Path], bool]


def _is_state(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format", "").startswith("gecko-state-")
    except (SafetensorError, ValueError):
        return False


def _is_page(path: Path) -> bool:
    from gecko.pages import is_page

    return is_page(path)


def _starts_with(pattern: bytes) -> Callable[[Path], bool]:
    def recognises(path: Path) -> bool:
        with path.open("rb") as file:
            return re.match(pattern, file.read(1 << 12), re.DOTALL) is not None

    return recognises


STATE = Kind("a reading state", _is_state)
EVALUATION = Kind("the results of gecko eval", _starts_with(rb'\s*{\s*"format":\s*"gecko-evaluation-'))
PAGE = Kind("a page written by gecko", _is_page)


def output_file(
    out: str, kind: Kind, *, inputs: Iterable[str | None] = (), force: bool = False, option: str = "--out"
) -> Path:
    """Return the path that an option names, and create its folder.

    Commands call this before their work, so that a mistake is found at once. Raise FileExistsError if the existing file
    must not be replaced, ValueError if the path is a folder, a device or a pipe, or its folder cannot be written to.

    Args:
        out: value of the option.
        inputs: files and folders that the command reads, except a state that it continues. Names that are not paths
            are ignored.
        force: allow to replace a file of another kind that the command does not read.
        option: name of the option, for error messages.
    """
    from gecko.io.files import check_replaceable

    path = Path(out).expanduser()
    try:
        check_replaceable(path)
        # The target of a link is replaced, not the link.
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise _not_writable(out, option) from error
    if not writable:
        raise _not_writable(out, option)
    if path.exists():
        _check_kind(path, kind, [Path(name).expanduser() for name in inputs if name], force, option)
    return path


def _not_writable(out: str, option: str) -> ValueError:
    return ValueError(
        f"{option} must be a file in a folder that can be written to, and no device or pipe; got {out}. "
        "Name another path."
    )


def _check_kind(path: Path, kind: Kind, inputs: Iterable[Path], force: bool, option: str) -> None:
    existing = [read for read in inputs if read.exists()]
    known = path.stat().st_size > 0 and kind.recognises(path)
    # The results of an evaluation may be in the folder of the run that is evaluated.
    if any(path.samefile(read) for read in existing) or (
        not known and any(_is_inside(path, read) for read in existing)
    ):
        raise FileExistsError(f"{option} must not be a file that this command reads; {path} is one. Name another file.")
    if path.stat().st_size and not known and not force:
        raise FileExistsError(
            f"{option} must be a new file, or {kind.name}, which is replaced; {path} is something else. "
            f"Name another file{', or add --force to replace it' if option.startswith('--') else ''}."
        )


def _is_inside(path: Path, read: Path) -> bool:
    return read.is_dir() and read.resolve() in path.resolve().parents


def new_model_folder(out: Path, option: str = "OUT") -> Path:
    """Return the folder for a new model, with ``~`` expanded. Raise FileExistsError if the folder is not empty, or is
    or lies inside a training run or a checkpoint."""
    folder = outside_of_runs(out, option)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{option} must be a new folder; {folder} is a file. Name another one.")
    if folder.is_dir() and any(folder.iterdir()):
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:4])
        raise FileExistsError(f"{option} must be a new folder, or an empty one; {folder} holds {held}. Name another.")
    return folder


def outside_of_runs(out: Path, option: str) -> Path:
    """Return the folder with ``~`` expanded. Raise FileExistsError if the folder is or lies inside a training run or a
    checkpoint."""
    from gecko.io.model_folder import run_or_checkpoint

    folder = out.expanduser()
    real = folder.resolve()
    for place in (real, *real.parents):
        if found := run_or_checkpoint(place):
            raise FileExistsError(
                f"{option} must be a folder outside of training runs; {folder} is {'' if place == real else 'inside '}"
                f"{found} ({place}), whose model it would hide. Name another folder."
            )
    return folder
