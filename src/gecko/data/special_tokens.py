"""Special tokens in rendered chat templates, apart from the same characters inside messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

_MARK = "\ue000"
"""Begins what replaces a part of a message while the template is rendered."""
_ITSELF, _BREAK, _STAND_INS = _MARK + "\ue001", _MARK + "\ue002", 0xF0000
"""Replacement of the mark itself; what divides special tokens; first of the characters that, after a mark, replace
special tokens of one character, which cannot be divided."""
_PART = 1 << 16
"""Characters of a message that are processed in one call, which holds the GIL until it returns."""


class SpecialTokens:
    """Finds the special tokens of a rendered template, but not the same characters inside messages.

    Args:
        ids: id of each special token, by its text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        any_of_them = "|".join(sorted(map(re.escape, ids), key=len, reverse=True)) or r"(?!)"
        self._whole = re.compile(any_of_them)
        # A lookahead finds all starts: special tokens may overlap or contain one another.
        self._first = re.compile(f"(?={any_of_them})")
        self._longest = max(map(len, ids), default=1)
        letters = [ord(text) for text in ids if len(text) == 1]
        self._hidden = {letter: _MARK + chr(_STAND_INS + index) for index, letter in enumerate(letters)}
        self._hidden[ord(_MARK)] = _ITSELF

    def protect(self, text: str) -> str:
        """Mark a message so that ``split`` finds no special token in it; ``split`` removes the marks."""
        borders = [0, *(start + 1 for start in self._starts(text)), len(text)]
        return _BREAK.join(_translate(text[begin:end], self._hidden) for begin, end in pairwise(borders))

    def protect_all(self, value: Any) -> Any:
        """Return a value of JSON with all of its texts marked."""
        if isinstance(value, dict):
            return {self.protect_all(name): self.protect_all(one) for name, one in value.items()}
        if isinstance(value, list):
            return list(map(self.protect_all, value))
        return self.protect(value) if isinstance(value, str) else value

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the ids of special tokens and the texts between them, without marks."""
        begin = at = 0
        while at < len(text):
            found = self._whole.search(text, at, at + _PART + self._longest)
            if found is None or found.start() > at + _PART:
                # A match beyond this part may be cut short; the next part finds it in full.
                at += _PART
                continue
            yield from self._plain(text[begin : found.start()])
            yield self.ids[found[0]]
            begin = at = found.end()
        yield from self._plain(text[begin:])

    def _starts(self, text: str) -> Iterator[int]:
        for begin in range(0, len(text), _PART):
            for found in self._first.finditer(text, begin, begin + _PART + self._longest):
                if found.start() < begin + _PART:
                    yield found.start()

    def _plain(self, text: str) -> list[str]:
        text = text.replace(_BREAK, "")
        for letter, hidden in self._hidden.items():  # the mark itself comes last
            text = text.replace(hidden, chr(letter))
        return [text] if text else []


def _translate(text: str, table: Mapping[int, str]) -> str:
    return "".join(text[begin : begin + _PART].translate(table) for begin in range(0, len(text), _PART))
