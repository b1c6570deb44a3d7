"""A command is a dataclass: its fields are arguments and options, and the docstrings below them are their help::

    class Average(Command):
        \"""Average the weights of a run's last checkpoints, and write the model.\"""

        source: Path = argument("RUN")
        \"""Folder of a training run.\"""
        last: int = option(5, min=1)
        \"""Number of newest checkpoints.\"""

        def run(self) -> None: ...

What several commands share is a base class: fields, and the work on them. Modules of commands import PyTorch, and the
parts of the package that need it, inside of functions only: help is printed without them.

A command replaces an existing file if the file is empty or of the kind that the command writes; it replaces any other
file only with ``--force``. It never replaces a file that it reads, except the reading state that it continues: it reads
the whole state first and then replaces it by the new one.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, dataclass_transform

import typer

from gecko.records import argument, docstrings, field_types, option
from gecko.runtime.process import keep_freed_memory
from gecko.runtime.terminal import visible

if TYPE_CHECKING:
    from gecko.data import Tokenizer
    from gecko.inference import Sampling
    from gecko.models.gecko import Gecko
    from gecko.state import GeckoState

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


@dataclass(kw_only=True, repr=False, eq=False)
@dataclass_transform(kw_only_default=True, field_specifiers=(argument, option))
class Command:
    """A command: its values, and its work. Subclasses are dataclasses by themselves."""

    def __init_subclass__(cls) -> None:
        # All commands are made before one is run, and the other methods of a dataclass take long to make.
        dataclass(kw_only=True, repr=False, eq=False)(cls)

    def run(self) -> None:
        raise NotImplementedError

    @property
    def inputs(self) -> list[str]:
        """Names of the files and folders that the command reads."""
        named = [getattr(self, field.name) for field in dataclasses.fields(self) if field.metadata.get("reads")]
        return [str(name) for names in named for name in (names if isinstance(names, list) else [names]) if name]


def function_of(kind: type[Command], name: str) -> Callable[..., None]:
    """Return the function of which typer makes the command ``name``."""

    def run(**values: Any) -> None:
        _made(kind, values).run()

    parameters = list(_parameters(kind))
    run.__name__, run.__doc__ = name, kind.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return a command, or a record in it, from the values of its options. None is what the user left out.

    The ``~`` of paths is expanded.
    """
    made = {}
    for field in dataclasses.fields(kind):
        hint, value, unit = field_types(kind)[field.name], values.get(field.name), field.metadata.get("unit", 1)
        if dataclasses.is_dataclass(hint):
            made[field.name] = _made(hint, values)
        elif value is not None and _is_option(kind, field):
            made[field.name] = value.expanduser() if isinstance(value, Path) else value * unit if unit > 1 else value
    return kind(**made)


def _is_option(kind: Any, field: Field[Any]) -> bool:
    """Return whether the command line has a field: all of commands, and those of records in them that say so."""
    return issubclass(kind, Command) or "flags" in field.metadata


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield the arguments, those of bases first; then the options, those of bases last, with those of records."""
    hints, texts = field_types(kind), docstrings(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    arguments = [name for name, field in fields.items() if field.metadata.get("flags", ()) is None]
    names = [name for base in kind.__mro__ for name in inspect.get_annotations(base) if name in fields]
    for name in dict.fromkeys([*arguments, *names]):
        field = fields[name]
        if dataclasses.is_dataclass(hints[name]):
            yield from _parameters(hints[name])
        elif _is_option(kind, field):
            flags, unit = field.metadata.get("flags", ()), field.metadata.get("unit", 1)
            shown = {**field.metadata.get("shown", {}), "help": " ".join(texts.get(name, "").split())}
            named = flags or (f"--{name.replace('_', '-')}",)
            info = typer.Argument(**shown) if flags is None else typer.Option(*named, **shown)
            default = field.default if unit == 1 else field.default // unit
            if default is MISSING:
                default = inspect.Parameter.empty if field.default_factory is MISSING else None
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hints[name], info]
            )


class TakesModel(Command):
    """A command on a model."""

    model: str = argument("MODEL", reads=True)
    """Model folder, training run (its newest checkpoint is used), or books."""


class TakesTokenizer(TakesModel):
    """A command on a model and its tokenizer."""

    tokenizer: str | None = option(metavar="SPEC", show_default="the model's own", reads=True)
    """bytes, or the path of a tokenizer."""


class TakesDevice(Command):
    """A command that computes on a device."""

    device: str = "auto"
    """Device: auto (CUDA if it is available), cpu, cuda, or cuda:N."""


class LoadsModel(TakesTokenizer, TakesDevice):
    """A command that loads a model for inference."""

    dtype: str | None = option(show_default="as stored")
    """Dtype of the weights: float32 or bfloat16."""

    def load(self) -> tuple[Gecko, Tokenizer]:
        from gecko.cli.arguments import load_gecko

        return load_gecko(self.model, self.tokenizer, self.device, self.dtype)


class WritesFile(Command):
    """A command that writes a file, for which it may replace another."""

    force: bool = False
    """Replace a file of another kind. Files that the command reads are never replaced."""

    def output_file(self, out: str, kind: Kind, option: str = "--out") -> Path:
        return output_file(out, kind, inputs=self.inputs, force=self.force, option=option)


class StartsFromState(LoadsModel):
    """A command that may continue from a reading state."""

    state: str | None = option(metavar="S")
    """Reading state to continue from."""

    def load_with_state(self) -> tuple[Gecko, Tokenizer, GeckoState | None]:
        """Load a Gecko, its tokenizer, and the state if one is given, which this model must have written."""
        from gecko.inference.prefill import inference
        from gecko.state import GeckoState

        before = None if self.state is None else GeckoState.load(Path(self.state).expanduser())
        model, tokenizer = self.load()
        if before is not None:
            try:
                with inference(model):  # elsewhere a state of other weights is not refused
                    model.check_state(before, 1)
            except ValueError as error:
                raise ValueError(
                    f"{self.state} cannot be continued with {self.model}: {error} A state goes with the model that "
                    f"wrote it; `gecko read {self.model} TEXT --out FILE` writes one of this model."
                ) from error
        keep_freed_memory()
        return model, tokenizer, before


class WritesText(StartsFromState):
    """A command whose model writes a text."""

    max_new_tokens: int = option(256, "--max-new-tokens", "-n", min=0)
    """Largest number of new tokens."""
    temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    top_k: int | None = None
    """Sample from the K most likely tokens."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities sum to P."""
    min_p: float | None = None
    """Sample from tokens with at least P times the highest probability."""
    repetition_penalty: float = 1.0
    """Values above 1 make tokens of the preceding text less likely."""
    seed: int | None = option(show_default="random")
    """Seed; the same seed gives the same text."""

    def build_kernels(self) -> None:
        """Start to build the kernels of decoding, while PyTorch is imported."""
        from gecko.ops.backends.cpu_library import start_building

        if not self.device.startswith("cuda"):
            start_building("decoding")

    def sampling(self) -> Sampling:
        from gecko.inference import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)


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


def _is_evaluation(path: Path) -> bool:
    with path.open("rb") as file:
        return re.match(rb'\s*{\s*"format":\s*"gecko-evaluation-', file.read(1 << 12)) is not None


def _is_page(path: Path) -> bool:
    from gecko.pages import is_page

    return is_page(path)


STATE = Kind("a reading state", _is_state)
EVALUATION = Kind("the results of gecko eval", _is_evaluation)
PAGE = Kind("a page written by gecko", _is_page)


def output_file(
    out: str, kind: Kind, *, inputs: Iterable[str | None] = (), force: bool = False, option: str = "--out"
) -> Path:
    """Return the path that an option names, checked, and create its folder.

    Commands call this before their work, so that a mistake is found at once. ``inputs`` are the files and folders that
    the command reads, except a state that it continues; names that are not paths are ignored.
    """
    from gecko.io.files import check_replaceable

    path = Path(out).expanduser()
    refusal: OSError | None = None
    try:
        check_replaceable(path)
        # The target of a link is replaced, not the link.
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        writable, refusal = False, error
    if not writable:
        raise ValueError(
            f"{option} must be a file in a folder that can be written to, and no device or pipe; got {out}. "
            "Name another path."
        ) from refusal
    if not path.exists():
        return path
    existing = [read for name in inputs if name and (read := Path(name).expanduser()).exists()]
    known = path.stat().st_size > 0 and kind.recognises(path)
    # The results of an evaluation may be in the folder of the run that is evaluated.
    inside = any(read.is_dir() and read.resolve() in path.resolve().parents for read in existing)
    if any(path.samefile(read) for read in existing) or (inside and not known):
        raise FileExistsError(f"{option} must not be a file that this command reads; {path} is one. Name another file.")
    if path.stat().st_size and not known and not force:
        raise FileExistsError(
            f"{option} must be a new file, or {kind.name}, which is replaced; {path} is something else. "
            f"Name another file{', or add --force to replace it' if option.startswith('--') else ''}."
        )
    return path
