"""The settings of a run as lines: what each is set to, and what it means."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shlex
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any


def described(settings: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Of each field: its dotted name, its value as an override takes it, and the first line of its docstring.

    Fields of nested dataclasses stand in their place. The docstring is the text below the field in the source.
    """
    meanings = _first_lines(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from described(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, shlex.quote(_as_text(value)), meanings.get(field.name, "")


def _first_lines(cls: type) -> dict[str, str]:
    """Python keeps no docstrings of fields, so they are read where they were written."""
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
