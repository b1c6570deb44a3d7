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
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, dataclass_transform

import typer

from gecko.cli.common import Kind, output_file
from gecko.records import argument, docstrings, field_types, option
from gecko.runtime.process import keep_freed_memory

if TYPE_CHECKING:
    from gecko.data import Tokenizer
    from gecko.inference import Sampling
    from gecko.models.gecko import Gecko
    from gecko.state import GeckoState


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
        if dataclasses.is_dataclass(hints[name]):
            yield from _parameters(hints[name])
        elif _is_option(kind, fields[name]):
            yield _parameter(fields[name], hints[name], texts.get(name, ""))


def _parameter(field: Field[Any], hint: Any, text: str) -> inspect.Parameter:
    flags, unit = field.metadata.get("flags", ()), field.metadata.get("unit", 1)
    shown = {**field.metadata.get("shown", {}), "help": " ".join(text.split())}
    named = flags or (f"--{field.name.replace('_', '-')}",)
    info = typer.Argument(**shown) if flags is None else typer.Option(*named, **shown)
    default = field.default if unit == 1 else field.default // unit
    if default is MISSING:
        default = inspect.Parameter.empty if field.default_factory is MISSING else None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
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
        """Load a Gecko and its tokenizer for inference."""
        from gecko.cli.arguments import find_gecko, load_any_model
        from gecko.models.gecko import Gecko

        model, tokenizer = load_any_model(self.model, self.tokenizer, self.device, self.dtype, find_gecko)
        assert isinstance(model, Gecko)
        return model, tokenizer


class WritesFile(Command):
    """A command that writes a file, for which it may replace another."""

    force: bool = False
    """Replace a file of another kind. Files that the command reads are never replaced."""

    def output_file(self, out: str, kind: Kind, option: str = "--out") -> Path:
        """Return the path that an option names, checked as by ``common.output_file``."""
        return output_file(out, kind, inputs=self.inputs, force=self.force, option=option)


class StartsFromState(LoadsModel):
    """A command that may continue from a reading state."""

    state: str | None = option(metavar="S")
    """Reading state to continue from."""

    def load_state(self) -> GeckoState | None:
        from gecko.state import GeckoState

        return None if self.state is None else GeckoState.load(Path(self.state).expanduser())

    def load_for(self, before: GeckoState | None) -> tuple[Gecko, Tokenizer]:
        """Load a Gecko and its tokenizer, which can continue from the state."""
        from gecko.cli.arguments import check_state

        model, tokenizer = self.load()
        if self.state is not None and before is not None:
            check_state(model, before, self.state, self.model)
        keep_freed_memory()
        return model, tokenizer


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
