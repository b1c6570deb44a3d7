"""JSON that other programs read as its schema says, where the library of grammars rounds, ignores or cannot count."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_WHOLE, _DIGITS = 1 << 53, 15
"""Largest integer, and digits of other numbers, that the library holds without an error."""
_MULTIPLE = 1000
"""Largest ``multipleOf``; the library needs as many states."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
_FORMATS = {
    "date": "^(?:[1-9]|0[1-9]|00[1-9]|000[1-9])[0-9]*-(?:0[13-9]|1|02-(?:[01]|2[0-8]))",
    "time": ":[0-9]{2}:[0-5]",
}
"""Patterns that exclude days and seconds which only some years and programs have: 29 February and second 60."""
_PARTS = re.compile(r"\\[pP]\{?.|\\.|\[(?P<negated>\^?)(?P<inside>(?:\\.|[^\]\\])*)\]", re.DOTALL)
"""Escapes and sets of a regular expression."""
_CONTROLS = re.compile(r"\0|\\(?:x00|u0000|U00000000|[xuU]\{0*\}|[pP]\{?[^{LMN])")


def exact_schema(source: str) -> str:
    """Return a schema for the library whose texts fit the schema ``source``, as programs with float64 read both. Raise
    ValueError if the source is not JSON, or has what the library does not hold exactly."""
    try:
        return json.dumps(_exact(json.loads(source)))
    except RecursionError:
        raise ValueError("a schema must not be nested so deep") from None


def exact_pattern(pattern: str) -> str:
    """Return a regular expression for the library whose texts match ``pattern`` in other programs too.

    Where a set has all control characters, the library adds the quote and the backslash: NUL is left out of sets. Raise
    ValueError if other programs read a set otherwise, or the pattern asks for NUL.
    """

    def exact(part: re.Match[str]) -> str:
        inside = part["inside"]
        if inside == "" or (inside and re.search(r"\[|&&|--|~~", re.sub(r"\\.", "", inside, flags=re.DOTALL))):
            raise ValueError(
                f"[…] in a pattern must not be empty or have '[', '&&', '--' or '~~'; got {part[0][:100]!r}"
            )
        if part["negated"]:
            return f"[^\\x00{inside}]"
        if _CONTROLS.search(part[0]):
            raise ValueError(f"a pattern must not have NUL or classes of control characters; got {part[0][:100]!r}")
        return part[0]

    return _PARTS.sub(exact, pattern)


def _exact(value: Any, keyword: str = "") -> Any:
    """Return the value of a keyword with its schemas in their exact form."""
    if isinstance(value, list):
        return [_exact(one, keyword) for one in value]
    if isinstance(value, int | float) and not (abs(value) <= _WHOLE and _read(value) == value):
        rule = f"numbers must be integers in -2^53..2^53, or have at most {_DIGITS} digits, as others are rounded"
        raise ValueError(f"{rule}; got {str(value)[:40]}")
    if not isinstance(value, dict):
        return value
    if keyword not in (*_NAMED, "const", "enum"):
        return _exact_keywords({name: _exact(one, name) for name, one in value.items()})
    if wrong := next(filter(re.compile(r"[\0-\x1f\x7f]").search, value), None):
        raise ValueError(f"names of properties must not have control characters; got {wrong[:40]!r}")
    rename = exact_pattern if keyword == "patternProperties" else str
    return {rename(name): _exact(one, "" if keyword in _NAMED else keyword) for name, one in value.items()}


def _read(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _exact_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    multiple, pattern = schema.get("multipleOf", 1), schema.get("pattern")
    if isinstance(multiple, int | float) and not (0 < multiple <= _MULTIPLE and multiple == int(multiple)):
        raise ValueError(f"multipleOf must be an integer in 1..{_MULTIPLE}; got {multiple}")
    if isinstance(pattern, str):
        schema["pattern"] = exact_pattern(pattern)
    for bound, choose, sign in (("Minimum", max, 1), ("Maximum", min, -1)):
        excluded: Any = schema.get(f"exclusive{bound}")
        if type(excluded) in (int, float):
            # The text of a number may have more digits than float64, and be read as the bound itself.
            inside = _read(excluded + sign * max(abs(excluded) * 1e-14, 1e-15))
            schema[bound.lower()] = choose(inside, schema.get(bound.lower(), inside))
            del schema[f"exclusive{bound}"]
    if isinstance(form := schema.get("format"), str):
        patterns = [{"pattern": pattern} for name, pattern in _FORMATS.items() if name in form.split("-")]
        schema["allOf"] = [*schema.get("allOf", ()), *patterns]
    if not isinstance(schema.get("items"), list):
        schema.pop("additionalItems", None)  # it has no effect, but the library would ignore prefixItems
    schema.pop("$schema", None)  # of older drafts, the library ignores const and others
    return schema


class Names(NamedTuple):
    """Names of the objects that are open at a place in a text of JSON."""

    open: tuple[frozenset[bytes] | None, ...] = ()
    """Names of each open object; None for a list."""
    string: bytes | None = None
    """The part of the open string that was read, if the string is a name."""
    is_name: bool = False
    """Whether the string that is open, or the next one, is a name."""
    escaped: bool = False

    def read(self, part: bytes) -> Names | None:
        """Return the names after the next part of the text; None if it repeats a name, or spells one with ``\\u``:
        by another spelling, the name of a property passes as that of an additional one.
        """
        opened, string, is_name, escaped = self
        for symbol in (part[at : at + 1] for at in range(len(part))):
            if is_name and escaped and symbol == b"u":
                return None
            if string is not None and (symbol != b'"' or escaped):
                string += symbol if is_name else b""
                escaped = symbol == b"\\" and not escaped
            elif string is not None:
                if is_name and string in (known := opened[-1] or frozenset()):
                    return None
                opened = (*opened[:-1], known | {string}) if is_name else opened
                string, is_name = None, False
            elif symbol == b'"':
                string = b""
            elif symbol in b"{[":
                opened, is_name = (*opened, frozenset() if symbol == b"{" else None), symbol == b"{"
            elif symbol in b"}]":
                opened, is_name = opened[:-1], False
            elif symbol == b",":
                is_name = opened[-1] is not None
        return Names(opened, string, is_name, escaped)


class JsonTokens:
    """Tokens as parts of a text of JSON. ``parts`` has the bytes of every id."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.parts = parts
        names = [b'"' in part or b"\\u" in part for part in parts]
        escapes = [found or part.startswith(b"u") for found, part in zip(names, parts, strict=True)]
        self._ending = [np.flatnonzero(found) for found in ([part.count(b'"') > 1 for part in parts], names, escapes)]
        """Ids that ``Names.read`` may refuse: outside of a name, in one, and after a backslash in one."""

    def refused(self, names: Names, allowed: np.ndarray) -> list[int]:
        """Return the tokens that must not come next; ``allowed``: (V,) bool, those that may by the grammar."""
        ending = self._ending[0 if not names.is_name or names.string is None else 1 + names.escaped]
        return [index for index in ending[allowed[ending]].tolist() if names.read(self.parts[index]) is None]
