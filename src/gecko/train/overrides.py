"""Fields of settings: from JSON values and ``key=value`` overrides, help for each, and checks of their values."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import shlex
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gecko.config import MODEL_TYPE, unknown_name
from gecko.models import CONFIGS, ModelConfig

T = TypeVar("T")

_MOST = 2**31 - 1
"""Largest number that a setting may be: tokens and steps beyond it are mistakes, and products of two fit 64 bits."""
_WORDS: dict[str, bool] = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


OLD_NAMES = {"accumulation": "gradient_accumulation_steps"}
"""Field names of earlier versions and their current names. Recipes and overrides accept both."""


def current_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with current field names."""
    return {OLD_NAMES.get(name, name): value for name, value in values.items()}


def current_override(override: str) -> str:
    """Return ``key=value`` with the current field name."""
    key, separator, value = override.partition("=")
    return OLD_NAMES.get(key, key) + separator + value


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build an instance of the dataclass ``cls``; nested dataclasses take nested mappings.

    Raise ValueError that gives the dotted name of the field if the name is unknown, a required field is missing, or a
    value does not fit the annotation.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise ValueError(unknown_name("field", prefix + name, [prefix + known for known in fields]))
    missing = [name for name, field in fields.items() if name not in values and _required(field)]
    if missing:
        raise ValueError(f"{cls.__name__} needs the fields {', '.join(prefix + name for name in missing)}.")
    return cls(**{name: convert(value, hints[name], prefix + name) for name, value in values.items()})


def convert(value: Any, annotation: Any, name: str) -> Any:
    """Convert ``value`` (text or a JSON value) to the type ``annotation``; error messages call the field ``name``."""
    if annotation == ModelConfig:
        return _model(_fields(value, name), name)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return build(annotation, _fields(value, name), f"{name}.")
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _optional(value, annotation, name)
    if origin is Literal:
        choices = {str(choice): choice for choice in get_args(annotation)}
        if str(value) not in choices:
            raise ValueError(unknown_name(name, value, choices))
        return choices[str(value)]
    if origin is tuple:
        return _tuple(value, get_args(annotation), name)
    return _scalar(value, annotation, name)


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} has fields of its own, so set one of them, as {name}.field=value; got {value!r}.")
    return value


def _model(fields: Mapping[str, Any], name: str) -> ModelConfig:
    """Build the config of the architecture ``model_type``; without it, as in older files, that of a Gecko."""
    kind = fields.get("model_type", MODEL_TYPE)
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise ValueError(unknown_name(f"{name}.model_type", kind, CONFIGS))
    own = {field: value for field, value in fields.items() if field != "model_type"}
    return build(CONFIGS[kind], own, f"{name}.")


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _optional(value: Any, annotation: Any, name: str) -> Any:
    if _is_none(value):
        return None
    (inner,) = (option for option in get_args(annotation) if option is not type(None))
    return convert(value, inner, name)


def _tuple(value: Any, inner: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    items = [] if _is_none(value) else _listed(value) if isinstance(value, str) else value
    any_number = len(inner) == 2 and inner[1] is Ellipsis
    if not isinstance(items, list | tuple) or not (any_number or len(items) == len(inner)):
        count = "any number of" if any_number else len(inner)
        raise ValueError(f"{name} takes {count} values separated by commas; got {value!r}.")
    kinds = inner[:1] * len(items) if any_number else inner
    return tuple(convert(item, kind, name) for item, kind in zip(items, kinds, strict=True))


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


def _listed(text: str) -> list[str]:
    """Split ``text`` at commas. Remove one enclosing pair of brackets only: a glob may start or end with a bracket."""
    text = text.strip()
    if len(text) > 1 and text[0] + text[-1] in ("()", "[]"):
        text = text[1:-1]
    return [item for part in text.split(",") if (item := part.strip())]


def _scalar(value: Any, kind: type, name: str) -> Any:
    if kind is str and isinstance(value, str):
        return value
    text = str(value).strip().replace("_", "")
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        if kind is int and not isinstance(value, bool):
            return int(text)
        if kind is float and not isinstance(value, bool):
            return float(text)
    except (KeyError, ValueError):
        pass
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    raise ValueError(f"{name} must be {expected}; got {value!r}.")


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
    meanings = _first_lines(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_help(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, shlex.quote(_as_text(value)), meanings.get(field.name, "")


def _first_lines(cls: type) -> dict[str, str]:
    """Return the first docstring line of each field, from the source: Python keeps no docstrings of fields."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: text.value.value.strip().splitlines()[0].replace("``", "")
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_as_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def check_counts(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is below 1."""
    _check(settings, names, prefix, lambda value: value >= 1, "must be at least 1")


def check_positive(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is not above 0 and finite."""
    _check(settings, names, prefix, lambda value: 0 < value < math.inf, "must be above 0 and finite")


def check_limits(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is neither None nor above 0 and finite."""
    _check(settings, names, prefix, lambda value: 0 < value < math.inf, "must be above 0 and finite, or none")


def check_not_negative(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is below 0 or not finite."""
    _check(settings, names, prefix, lambda value: 0 <= value < math.inf, "must be 0 or above, and finite")


def check_fractions(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """Raise ValueError if a named attribute is not in 0..1."""
    _check(settings, names, prefix, lambda value: 0 <= value <= 1, "is a fraction and must lie in 0..1")


def _check(settings: object, names: Sequence[str], prefix: str, holds: Callable[[float], bool], rule: str) -> None:
    """Raise ValueError if a named attribute breaks the rule, or is a whole number or a time above ``_MOST``.

    None passes; where it is invalid, its type is refused.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not holds(value):
            raise ValueError(f"{prefix}{name} {rule}; got {value}.")
        if value is not None and (isinstance(value, int) or name.endswith("minutes")) and value > _MOST:
            raise ValueError(f"{prefix}{name} must be at most {_MOST:,}; got {value}.")
