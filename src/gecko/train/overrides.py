"""``key=value`` overrides of settings: their names, also those of earlier versions, and the help for each."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from gecko.records import docstrings, unknown_name

OLD_NAMES = {"accumulation": "gradient_accumulation_steps"}
"""Field names of earlier versions and their current names. Recipes and overrides accept both."""


def current_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with current field names."""
    return {OLD_NAMES.get(name, name): value for name, value in values.items()}


def current_override(override: str) -> str:
    """Return ``key=value`` with the current field name."""
    key, separator, value = override.partition("=")
    return OLD_NAMES.get(key, key) + separator + value


def set_fields(values: dict[str, Any], overrides: Iterable[str], fixed: Collection[str] = ()) -> None:
    """Set each ``key=value``, with a dotted key, in the nested ``values``; the value stays text.

    Raise ValueError for an unknown key, with the nearest known one. Keys in ``fixed`` count as unknown.
    """
    known = [name for name in flatten(values) if name not in fixed]
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            hint = f" To train on it: data.source={override}" if Path(override).exists() else ""
            raise ValueError(f"an override must read key=value, for example steps=100; got {override!r}.{hint}")
        if key not in known:
            raise ValueError(f"{_unknown_setting(key, known)} gecko train RECIPE --show lists all.")
        *path, name = key.split(".")
        reduce(getitem, path, values)[name] = value


def _unknown_setting(key: str, known: Collection[str]) -> str:
    meant = ELSEWHERE.get(key.lower())
    if meant in known:
        return f"override must be a setting of the recipe; got {key!r}. Did you mean {meant!r}?"
    return unknown_name("override", key, known)


ELSEWHERE = {
    "lr": "optimizer.learning_rate", "wd": "optimizer.weight_decay", "grad_clip": "optimizer.clip",
    "max_steps": "steps", "max_iters": "steps", "num_iterations": "steps", "epochs": "steps", "dtype": "precision",
    "block_size": "sequence_length", "context_length": "sequence_length", "max_seq_length": "sequence_length",
    "vocab": "model.vocab_size", "n_layer": "model.num_layers", "n_embd": "model.model_dim", "out": "output",
}  # fmt: skip
"""Names that other training programs give to settings."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def settings_help(settings: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield for each field its dotted name, its value as an override takes it, and the first line of its docstring.

    A nested dataclass yields its fields. The docstring of a field is the string below it in the source.
    """
    meanings = docstrings(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_help(value, f"{prefix}{field.name}.")
        else:
            meaning = meanings.get(field.name, "").partition("\n")[0].replace("``", "")
            yield prefix + field.name, shlex.quote(_as_text(value)), meaning


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_as_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
