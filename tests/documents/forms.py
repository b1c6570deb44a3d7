"""Form of an output: its lines with numbers replaced, the keys of JSON, the words of a table.

A page shows the output of another model than the one that the check trains, on another machine. So numbers, sizes,
hashes and quoted texts may differ, and everything else may not. A line ``…`` stands for any lines, and a line that
ends in ``…`` for all that begin like it.
"""

import json
import re
from collections import Counter
from difflib import unified_diff
from typing import Any

ANY = "…"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_HASH = re.compile(r"\b[0-9a-f]{12,}\b")
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])[-+−]?\d[\d,_]*(?:\.\d+)?(?:e[-+]?\d+)?")
_SIZE = re.compile(r"\b0 [KMGT]?B\b")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_BORDERS = re.compile(r"[─-╿]+")


def form(line: str) -> str:
    """Return a line with numbers and hashes replaced by 0, and white space by single spaces."""
    line = _NUMBER.sub("0", _HASH.sub("0", _ESCAPE.sub("", line)))
    return " ".join(_SIZE.sub("0 B", line).split())


def form_of_values(line: str) -> str:
    """Return the form of a line of Python values, in which quoted texts are replaced too."""
    return form(_QUOTED.sub("''", line))


def lines_of(text: str, form: Any = form) -> list[str]:
    """Return the forms of the lines that are not empty."""
    return [line for line in map(form, text.splitlines()) if line]


def differences(shown: str, printed: str, form: Any = form) -> str:
    """Return how the form of the ``printed`` output differs from that of the ``shown`` one; empty if it does not."""
    (shown, shown_value), (printed, printed_value) = _split_json(shown), _split_json(printed)
    if _BORDERS.search(shown):
        return _differing_words(shown, printed) or _differing_keys(shown_value, printed_value)
    expected, found = lines_of(shown, form), lines_of(printed, form)
    if _matches(expected, found):
        return _differing_keys(shown_value, printed_value)
    return "\n".join(unified_diff(expected, found, "the page", "the command", lineterm="", n=1))


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the forms of ``printed`` lines that the page does not show, in their order; none if it shows ``…``."""
    expected, missing, place = lines_of(shown), [], 0
    for line in lines_of(printed) if ANY not in expected else []:
        if line in expected[place:]:
            place = expected.index(line, place) + 1
        else:
            missing.append(line)
    return missing


def _matches(expected: list[str], found: list[str]) -> bool:
    """Return whether lines match, where ``…`` stands for any lines, also none."""
    if not expected:
        return not found
    if expected[0] == ANY:
        return any(_matches(expected[1:], found[start:]) for start in range(len(found) + 1))
    return bool(found) and _same(expected[0], found[0]) and _matches(expected[1:], found[1:])


def _same(expected: str, found: str) -> bool:
    return found.startswith(expected[:-1].rstrip()) if expected.endswith(ANY) else found == expected


def _differing_words(shown: str, printed: str) -> str:
    """Compare tables by their words, because columns and line breaks depend on the widths of the numbers."""
    expected, found = (Counter(form(_BORDERS.sub(" ", text)).split()) for text in (shown, printed))
    partial = bool(expected.pop(ANY, 0))
    missing, new = expected - found, Counter() if partial else found - expected
    problems = [("not printed", missing), ("not on the page", new)]
    return "\n".join(f"words that are {what}: {' '.join(words)}" for what, words in problems if words)


def _split_json(text: str) -> tuple[str, Any]:
    """Return the lines before a JSON object that ends a text, and the object; the text and None if there is none."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("{")), len(lines))
    try:
        return "\n".join(lines[:start]), json.loads("".join(lines[start:]))
    except ValueError:
        return text, None


def _differing_keys(shown: Any, printed: Any, path: str = "") -> str:
    """Compare the keys and the types of JSON values; of lists, the first elements."""
    if isinstance(shown, dict) and isinstance(printed, dict):
        if shown.keys() != printed.keys():
            return f"keys of {path or 'the answer'}: {sorted(shown)} on the page, {sorted(printed)} printed"
        return "\n".join(filter(None, (_differing_keys(shown[key], printed[key], f"{path}.{key}") for key in shown)))
    if isinstance(shown, list) and isinstance(printed, list):
        return _differing_keys(shown[0], printed[0], f"{path}[0]") if shown and printed else ""
    kinds = ["number" if isinstance(value, float | int) else type(value).__name__ for value in (shown, printed)]
    return "" if kinds[0] == kinds[1] else f"{path or 'the answer'} is {kinds[0]} on the page, {kinds[1]} printed"
