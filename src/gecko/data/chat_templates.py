"""Files of chat templates, and the special tokens that they write, apart from the same characters inside messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gecko.data.tokenizers import Tokenizer
from gecko.io.files import read_object

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def find_template(tokenizer: Tokenizer, model_folder: Path) -> Template | None:
    """Return the template in the folder of the tokenizer, else the one in the folder of the model, else None.

    Errors are those of ``find_format``.
    """
    folders = (folder for folder in (tokenizer.folder, model_folder) if folder is not None)
    return next((found for folder in folders if (found := _read_template(folder)) is not None), None)


class Template(NamedTuple):
    """A chat template and the file that holds it."""

    text: str
    path: Path


def _read_template(folder: Path) -> Template | None:
    if (folder / TEMPLATE).is_file():
        try:
            return Template((folder / TEMPLATE).read_text(encoding="utf-8"), folder / TEMPLATE)
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / TEMPLATE} must hold a chat template as UTF-8 text; {error}.") from error
    template = _read_json(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        with _naming(folder / CONFIG):
            named = {str(entry["name"]): entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(
                f"one of several chat templates must be named 'default'; {folder / CONFIG} has {sorted(named)}. "
                f"Save the template to use as {folder / TEMPLATE}."
            )
        template = named["default"]
    if not isinstance(template, str | None):
        raise ValueError(f"{folder / CONFIG} must hold a chat_template that is text; got a {type(template).__name__}.")
    return None if template is None else Template(template, folder / CONFIG)


def special_tokens(folder: Path) -> dict[str, int]:
    """Return text and id of the special tokens."""
    added = _read_json(folder / "tokenizer.json").get("added_tokens", [])
    decoder = _read_json(folder / CONFIG).get("added_tokens_decoder", {})
    with _naming(folder):
        every = [*added, *({"id": int(index), **token} for index, token in decoder.items())]
        if not all(isinstance(token["content"], str) for token in every):
            raise TypeError("the content of a token is no text")
        return {token["content"]: int(token["id"]) for token in every if token.get("special", True)}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Convert the errors of missing and unsuitable fields into one that names ``path``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} must hold a tokenizer; a field is missing or of another type: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, "a tokenizer") if path.is_file() else {}


_MARK = "\ue000"
"""Begins what replaces a part of a message while the template is rendered."""
_ITSELF, _BREAK, _STAND_INS = _MARK + "\ue001", _MARK + "\ue002", 0xF0000
"""Replacement of the mark itself; what divides special tokens; first of the characters that, after a mark, replace
special tokens of one character, which cannot be divided."""
_PART = 1 << 16
"""Characters of a message that are processed in one call, which holds the GIL until it returns."""


class SpecialTokens:
    """Finds the special tokens of a rendered template, but not the same characters inside messages.

    ``ids`` has the id of each, by its text.
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
