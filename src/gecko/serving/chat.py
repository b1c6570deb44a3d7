"""Convert conversations to prompts with the chat template of the tokenizer, or with a plain format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gecko.data import Tokenizer
from gecko.data.tokenizers import TokenIds
from gecko.io.files import read_object
from gecko.runtime.process import require
from gecko.serving.protocol import Message

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_MARK = "\ue000"
"""Marks the text of a special token inside a message while the template is rendered."""
_STAND_INS = 0xF0000
"""First of the private characters that replace one-character special tokens, which no mark can split."""

_PART = 1 << 16
"""Characters of a message that are processed in one call, which holds the GIL until it returns."""


def encode_text(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Encode one text with ``encode_batch``: ``encode`` of the library holds the GIL, for seconds with long texts."""
    return tokenizer.encode_batch([text])[0]


class ChatFormat(Protocol):
    """Format of conversations."""

    @property
    def source(self) -> str:
        """Description of its origin, for the log."""

    @property
    def stops(self) -> Sequence[str]:
        """Stop strings of an answer."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Stop tokens of an answer."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the prompt for the answer; ValueError if the conversation does not fit the format."""


class PlainChat:
    """Format for models without a template: role, colon and text per message, separated by empty lines.

    The answer ends where the model starts the next message.
    """

    source = "the plain format, as no chat template lies beside the tokenizer or the model"
    stops = ("\n\nUser:", "\n\nSystem:")
    _names: Mapping[str, str] = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = frozenset({tokenizer.document_end})

    def encode(self, messages: Sequence[Message]) -> list[int]:
        said = (f"{self._names[message.role]}: {message.content.strip()}\n\n" for message in messages)
        text = "".join(said) + "Assistant:"
        return [self._tokenizer.document_start, *encode_text(self._tokenizer, text).tolist()]


class TemplateChat:
    """Jinja template of a Hugging Face tokenizer.

    Special tokens of the template become their ids. The same characters in a message stay text, so a message cannot end
    its turn or imitate another role. Every special token ends an answer, because the token that closes a turn often
    differs from the one that ends a document.

    Args:
        source: file of the template.

    Raises:
        ValueError: the template is not valid Jinja.
    """

    stops: Sequence[str] = ()

    def __init__(self, tokenizer: Tokenizer, template: str, specials: Mapping[str, int], source: str) -> None:
        self._tokenizer, self._specials, self.source = tokenizer, _Specials(specials), source
        self.stop_ids = tokenizer.special_ids | frozenset(specials.values())
        texts = {index: text for text, index in specials.items()}
        self._names = {
            "bos_token": texts.get(tokenizer.document_start, ""),
            "eos_token": texts.get(tokenizer.document_end, ""),
        }
        try:
            self._template = _environment().from_string(template)
        except require("jinja2", "serve").TemplateError as error:
            raise ValueError(f"the chat template must be valid Jinja; {error}") from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        spoken = [{"role": message.role, "content": self._specials.protect(message.content)} for message in messages]
        try:
            text = self._template.render(messages=spoken, add_generation_prompt=True, **self._names)
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        parts = list(self._specials.split(text))
        encoded = iter(self._tokenizer.encode_batch([part for part in parts if isinstance(part, str)]))
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else next(encoded).tolist()
        return ids


class _Specials:
    """Finds the special tokens of a rendered template, but not the same characters inside messages.

    Args:
        ids: id of each special token, by its text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        any_of_them = "|".join(sorted(map(re.escape, ids), key=len, reverse=True)) or r"(?!)"
        self._whole = re.compile(any_of_them)
        # A lookahead finds all starts: special tokens may overlap or contain one another.
        self._first = re.compile(f"(?={any_of_them})")
        self._longest = max(map(len, ids), default=1)
        letters = [ord(text) for text in ids if len(text) == 1]
        self._hidden = {letter: _STAND_INS + index for index, letter in enumerate(letters)}
        self._shown: dict[int, int | None] = {private: letter for letter, private in self._hidden.items()}
        self._shown[ord(_MARK)] = None

    def protect(self, text: str) -> str:
        """Mark a message so that ``split`` finds no special token in it; ``split`` removes the marks."""
        clean = _translate(text, dict.fromkeys(self._shown))
        borders = [0, *(start + 1 for start in self._starts(clean)), len(clean)]
        return _translate(_MARK.join(clean[begin:end] for begin, end in pairwise(borders)), self._hidden)

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
            yield self._ids[found[0]]
            begin = at = found.end()
        yield from self._plain(text[begin:])

    def _starts(self, text: str) -> Iterator[int]:
        for begin in range(0, len(text), _PART):
            for found in self._first.finditer(text, begin, begin + _PART + self._longest):
                if found.start() < begin + _PART:
                    yield found.start()

    def _plain(self, text: str) -> list[str]:
        return [_translate(text, self._shown)] if text else []


def _translate(text: str, table: Mapping[int, int | None]) -> str:
    return "".join(text[begin : begin + _PART].translate(table) for begin in range(0, len(text), _PART))


def find_format(tokenizer: Tokenizer, model_folder: Path) -> ChatFormat:
    """Return the template in the folder of the tokenizer, else the one in the folder of the model, else the plain
    format.

    Raises:
        ValueError: a file is damaged, or has several templates and none is named ``default``.
    """
    for folder in (tokenizer.folder, model_folder):
        found = None if folder is None else _read_template(folder)
        if folder is not None and found is not None:
            # The folder may have special tokens that a SentencePiece model lacks; the ids of the tokenizer win.
            specials = {**_special_tokens(folder), **tokenizer.special_texts}
            return TemplateChat(tokenizer, found.text, specials, f"the template in {found.path}")
    return PlainChat(tokenizer)


class _Template(NamedTuple):
    text: str
    path: Path


def _read_template(folder: Path) -> _Template | None:
    if (folder / TEMPLATE).is_file():
        return _Template(_read_text(folder / TEMPLATE), folder / TEMPLATE)
    template = _read_json(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        with _naming(folder / CONFIG):
            named = {entry["name"]: entry["template"] for entry in template}
        template = _default_template(named, folder)
    return None if template is None else _Template(template, folder / CONFIG)


def _default_template(named: Mapping[str, str], folder: Path) -> str:
    if "default" not in named:
        raise ValueError(
            f"one of several chat templates must be named 'default'; {folder / CONFIG} has {sorted(named)}. "
            f"Save the template to use as {folder / TEMPLATE}."
        )
    return named["default"]


def _special_tokens(folder: Path) -> dict[str, int]:
    """Return text and id of the special tokens."""
    added = _read_json(folder / "tokenizer.json").get("added_tokens", [])
    decoder = _read_json(folder / CONFIG).get("added_tokens_decoder", {})
    with _naming(folder):
        every = [*added, *({"id": int(index), **token} for index, token in decoder.items())]
        return {token["content"]: token["id"] for token in every if token.get("special", True)}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Convert the errors of missing and unsuitable fields into one that names ``path``."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must hold a tokenizer; a field is missing or of another type: {error}.") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must hold a chat template as UTF-8 text; {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path, "a tokenizer")


def _environment() -> Any:
    """Return the Jinja environment that transformers uses for templates, sandboxed."""
    require("jinja2", "serve")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_blocks()]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.filters["tojson"] = _to_json
    return environment


def _generation_blocks() -> Any:
    """Return the extension for ``{% generation %}`` blocks around assistant turns, which are rendered unchanged."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012 (a class attribute for Jinja)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return GenerationBlocks


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
