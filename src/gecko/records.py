"""The one door for records: frozen dataclasses from JSON, from bodies of requests and from ``key=value`` texts.

The annotation of a field says which values it takes, so that a file, a request, an override and a call in Python are
refused by the same rule, in the same words::

    @dataclass(frozen=True)
    class Settings:
        every: Count = 100
        \"""Steps between two evaluations.\"""
        share: Annotated[float, Range("is a fraction and must lie in 0..1", least=0, most=1)] = 0.5

        def __post_init__(self) -> None:
            check(self)

    build(Settings, {"every": 0})  # ValueError: every must be at least 1; got 0.

Converting by hand, and not by a library, is shorter here: libraries drop or report unknown names and values in words of
their own, and know no texts such as ``none``, ``1_000`` or ``a,b``.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import re
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

MOST = 2**31 - 1
"""Largest count: tokens and steps beyond it are mistakes, and products of two fit 64 bits."""
LIMIT = f"must be at most {MOST:,}"
_MOST_LISTED = 20
"""Largest number of names that an error message lists."""
_LONGEST = 200
"""Characters of an unknown name that are compared and shown."""
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 100
_SHOWN.maxlist = 30
"""Shows values in messages: only the start of large ones."""
_WORDS: dict[str, bool] = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_KINDS: dict[type, str] = {
    bool: "must be true or false", int: "must be a whole number", float: "must be a number", str: "must be text",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Range:
    """Metadata of a number: the values that it may have, and the rule that a message about others states."""

    rule: str
    above: float = -math.inf
    below: float = math.inf
    least: float = -math.inf
    most: float = math.inf
    limit: str = ""
    """Rule for finite values over ``most``, if it is another one."""
    typed: bool = False
    """Whether the rule also says that the value must be a number, and of which kind."""

    def broken(self, number: float) -> str | None:
        """Return the rule that ``number`` breaks; None if it is in range."""
        if self.above < number < self.below and self.least <= number <= self.most:
            return None
        return self.limit if self.limit and self.most < number < math.inf else self.rule


@dataclasses.dataclass(frozen=True)
class Parsed:
    """Metadata of a field that a function converts: ``by(value, name, texts)``, with the arguments of ``convert``. It
    raises FieldError, and returns what it has made itself."""

    by: Callable[[Any, str, bool], Any]


Count = Annotated[int, Range("must be at least 1", least=1, most=MOST, limit=LIMIT)]
CountFromZero = Annotated[int, Range("must be 0 or above, and finite", least=0, most=MOST, limit=LIMIT)]
Positive = Annotated[float, Range("must be above 0 and finite", above=0)]
PositiveOrNone = Annotated[float, Range("must be above 0 and finite, or none", above=0)] | None
NotNegative = Annotated[float, Range("must be 0 or above, and finite", least=0)]
Fraction = Annotated[float, Range("is a fraction and must lie in 0..1", least=0, most=1)]


class FieldError(ValueError):
    """A field is unknown or missing, or its value does not fit. The message begins with ``field``, its dotted name."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def build(kind: type[T], values: Mapping[str, Any], prefix: str = "", *, texts: bool = False) -> T:
    """Build a dataclass from the JSON values of its fields; nested dataclasses take nested mappings.

    Args:
        prefix: start of the names of fields in error messages.
        texts: whether values may also be texts as in ``key=value``: ``1_000``, ``true``, ``none``, ``a,b``.

    Raises:
        FieldError: a name is unknown, a required field is missing, or a value does not fit the annotation.
        ValueError: fields do not fit each other.
    """
    hints = field_types(kind)  # type: ignore[arg-type]
    noun = re.findall("[A-Z][a-z0-9]*", kind.__name__)[-1].lower()
    for name in values:
        if name not in hints:
            known = [prefix + known for known in hints]
            raise FieldError(unknown_name(f"{noun} field", prefix + name, known), prefix + name)
    fields, none = dataclasses.fields(kind), dataclasses.MISSING  # type: ignore[arg-type]
    required = {x.name for x in fields if x.default is none and x.default_factory is none}
    missing = [prefix + name for name in hints if name not in values and name in required]
    if missing:
        given = _SHOWN.repr(sorted(values))
        article = "an" if noun[0] in "aeiou" else "a"
        raise FieldError(f"{article} {noun} needs the fields {missing}, which this one lacks; got {given}.", missing[0])
    return kind(**{name: convert(value, hints[name], prefix + name, texts=texts) for name, value in values.items()})


def check(record: object, prefix: str = "") -> None:
    """Raise FieldError if a field of a dataclass has a value that its annotation does not allow."""
    for name, hint in field_types(type(record)).items():  # type: ignore[arg-type]
        convert(getattr(record, name), hint, prefix + name)


@lru_cache(maxsize=256)
def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass by name; ``Annotated`` types keep their metadata."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def convert(value: Any, hint: Any, name: str, *, texts: bool = False) -> Any:
    """Return ``value`` as the annotation ``hint`` asks; errors call it ``name``. See ``build``."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(value, hint, name, texts)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, fields_of(value, name), f"{name}.", texts=texts)
    if origin in (Union, types.UnionType):
        (some,) = (option for option in inner if option is not types.NoneType)
        return None if _is_none(value, texts) else convert(value, some, name, texts=texts)
    if origin is Literal:
        if value not in inner:
            raise FieldError(unknown_name(name, value, inner), name)
        return value
    if origin in (tuple, list):
        return origin(_items(value, inner, name, texts))
    return _scalar(value, hint, name, texts)


def fields_of(value: Any, name: str) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, which a dataclass can be built from; else raise FieldError."""
    if not isinstance(value, Mapping):
        got = _SHOWN.repr(value)
        raise FieldError(f"{name} has fields of its own, so set one of them, as {name}.field=value; got {got}.", name)
    return value


def _annotated(value: Any, hint: Any, name: str, texts: bool) -> Any:
    for extra in hint.__metadata__:
        if isinstance(extra, Parsed):
            return extra.by(value, name, texts)
    ranges = [extra for extra in hint.__metadata__ if isinstance(extra, Range)]
    try:
        found = convert(value, hint.__origin__, name, texts=texts)
        number = found
    except FieldError:
        if not any(extra.typed for extra in ranges):
            raise
        found, number = value, math.nan  # out of every range
    for extra in ranges:
        if number is not None and (rule := extra.broken(number)):
            raise FieldError(f"{name} {rule}; got {_SHOWN.repr(found)}.", name)
    return found


def _is_none(value: Any, texts: bool) -> bool:
    return value is None or (texts and isinstance(value, str) and value.lower() in ("none", "null"))


def _items(value: Any, inner: tuple[Any, ...], name: str, texts: bool) -> Any:
    """Return the converted items of a list, of a tuple, or of a text with commas."""
    items = _listed(value) if texts and (value is None or isinstance(value, str)) else value
    any_number = len(inner) == 1 or inner[1] is Ellipsis
    if not isinstance(items, list | tuple) or not (any_number or len(items) == len(inner)):
        count = "any number of" if any_number else len(inner)
        rule = f"takes {count} values separated by commas" if texts else f"must be a list of {count} values"
        raise FieldError(f"{name} {rule}; got {_SHOWN.repr(value)}.", name)
    if any_number and inner[0] in (int, str) and set(map(type, items)) <= {inner[0]}:
        return items  # lists of millions of ids
    kinds = inner[:1] * len(items) if any_number else inner
    names = (name if texts else f"{name}.{number}" for number in range(len(items)))
    return [convert(*each, texts=texts) for each in zip(items, kinds, names, strict=True)]


def _listed(text: str | None) -> list[str]:
    """Split ``text`` at commas. Remove one enclosing pair of brackets only: a glob may start or end with a bracket."""
    text = "" if text is None or _is_none(text, texts=True) else text.strip()
    if len(text) > 1 and text[0] + text[-1] in ("()", "[]"):
        text = text[1:-1]
    return [item for part in text.split(",") if (item := part.strip())]


def _scalar(value: Any, kind: type, name: str, texts: bool) -> Any:
    given = value
    with suppress(KeyError, ValueError, OverflowError):  # the last of a whole number that no float holds
        if texts and isinstance(value, str) and kind is not str:
            digits = value.strip().replace("_", "")
            given = _WORDS[digits.lower()] if kind is bool else kind(digits)
        if isinstance(given, (int, float) if kind is float else kind) and (kind is bool or not isinstance(given, bool)):
            return kind(given)
    raise FieldError(f"{name} {_KINDS[kind]}; got {_SHOWN.repr(value)}.", name)


def option(default: Any = None, *flags: str, unit: int = 1, reads: bool = False, **shown: Any) -> Any:
    """Return a field that a command takes as an option; its help is the docstring below it.

    Args:
        default: MISSING if the option is required.
        flags: names of the option; without them it has that of the field.
        unit: what the option counts, such as ``1 << 20`` for a number of bytes that is given in megabytes.
        reads: whether it names files that the command reads, which no output may replace.
        shown: further arguments of ``typer.Option``, such as ``metavar``, ``min`` and ``show_default``.
    """
    return _command_field(default, flags=flags, unit=unit, reads=reads, shown=shown)


def argument(metavar: str, default: Any = dataclasses.MISSING, *, reads: bool = False) -> Any:
    """Return a field that a command takes as an argument, which is required unless it has a default. See ``option``."""
    return _command_field(default, flags=None, unit=1, reads=reads, shown={"metavar": metavar})


def _command_field(default: Any, **metadata: Any) -> Any:
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**given, metadata=metadata)


def docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, also of its bases, by name: the strings below the fields."""
    bases = [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]
    return {
        name: text for base in bases for name, text in _docstrings_in(base.__module__).get(base.__name__, {}).items()
    }


_CLASS = re.compile(r"^class (?P<name>\w+).*\n(?:(?:    (?!def |@).*|\).*)?\n)*", re.MULTILINE)
"""A class of a module up to its first method."""


@lru_cache(maxsize=64)
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields by class. Methods are left out, as to parse them takes most of the time."""
    try:
        heads = _CLASS.finditer(inspect.getsource(sys.modules[module]))
    except OSError:  # compiled modules may be installed without their source
        return {}
    found: dict[str, dict[str, str]] = {}
    for head in heads:
        definition: Any = ast.parse(f"{head[0]}    ...").body[0]
        texts = found[head["name"]] = {}
        for field_and_next in pairwise(definition.body):
            match field_and_next:
                case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                    texts[name] = inspect.cleandoc(text)
    return found


def unknown_name(kind: str, name: object, known: Any) -> str:
    """Return the error message for an unknown name, with the nearest known one; of many names only the nearest."""
    name = name[:_LONGEST] if isinstance(name, str) else _SHOWN.repr(name)
    choices = sorted(map(str, known))
    group = [choice for choice in choices if choice.startswith(f"{name.rstrip('.')}.")]
    # The nearest first; those that end in the name come first.
    small = {choice.lower(): choice for choice in reversed(choices)}
    same_end = [choice for choice in choices if choice.endswith((f".{name}", f"_{name}"))]
    alike = difflib.get_close_matches(name.lower(), small, n=4, cutoff=0.5)
    near = group or list(dict.fromkeys([*same_end, *(small[choice] for choice in alike)]))
    hint = f" Did you mean {near[0]!r}?" if near and not group else ""
    listed = ", ".join(choices)
    if len(choices) > _MOST_LISTED:
        listed = f"{len(choices)} names, such as {', '.join((near or choices)[:4])}"
    return f"{kind} must be one of {listed}; got {name!r}.{hint}"
