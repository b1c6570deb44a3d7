"""Conversations to prompts: by the tokenizer's own chat template, or by a plain default."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gecko.data import Tokenizer
from gecko.extras import require
from gecko.json_file import read_object
from gecko.serving.schemas import Message

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_MARK = "\ue000"
"""Keeps the text of a special token apart from the token while a template is filled in."""
_STAND_INS = 0xF0000
"""Private characters from here on stand in for special tokens of one character, which no mark can break."""


class ChatFormat(Protocol):
    """How a conversation becomes ids."""

    @property
    def source(self) -> str:
        """Where it is from, for people."""

    @property
    def stops(self) -> Sequence[str]:
        """Texts that end an answer."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to where the assistant's answer begins. ValueError if the conversation does not fit the format."""


class PlainChat:
    """For models without a template: who speaks, a colon, the text; an empty line between two.

    The answer ends where the model would go on as the user.
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
        return [self._tokenizer.document_start, *self._tokenizer.encode(text).tolist()]


class TemplateChat:
    """A Jinja template, as Hugging Face tokenizers carry it.

    Special tokens that the template writes become their ids. The same characters in a message stay text, so
    that no message can end its turn or speak for another. Any of them ends an answer: they stand for no text, and the
    one that closes a turn is often not the one that ends a document.

    Args:
        source: the file that the template is from.

    Raises:
        ValueError: the template is none.
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
        except Exception as error:  # a template is a program: it may fail in any way
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._specials.split(text):
            ids += [part] if isinstance(part, int) else self._tokenizer.encode(part).tolist()
        return ids


class _Specials:
    """Special tokens in a text, told apart from the same characters in a message.

    Args:
        ids: by their texts.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        any_of_them = "|".join(sorted(map(re.escape, ids), key=len, reverse=True)) or r"(?!)"
        self._whole = re.compile(any_of_them)
        # By where they begin: they may overlap, and one may hold another.
        self._first = re.compile(f"(?=(?:{any_of_them}))(.)", re.DOTALL)
        letters = [ord(text) for text in ids if len(text) == 1]
        self._hidden = {letter: _STAND_INS + index for index, letter in enumerate(letters)}
        self._shown: dict[int, int | None] = {private: letter for letter, private in self._hidden.items()}
        self._shown[ord(_MARK)] = None

    def protect(self, text: str) -> str:
        """A message in which ``split`` finds none; it gives the message back, without what is used as a mark here."""
        clean = text.translate(dict.fromkeys(self._shown))
        return self._first.sub(rf"\1{_MARK}", clean).translate(self._hidden)

    def split(self, text: str) -> Iterator[str | int]:
        """The ids of special tokens, and the texts between them."""
        begin = 0
        for found in self._whole.finditer(text):
            yield from self._plain(text[begin : found.start()])
            yield self._ids[found[0]]
            begin = found.end()
        yield from self._plain(text[begin:])

    def _plain(self, text: str) -> list[str]:
        return [text.translate(self._shown)] if text else []


def find_format(tokenizer: Tokenizer, model_folder: Path) -> ChatFormat:
    """The template beside the tokenizer's files, else beside the model's, else the plain default.

    Raises:
        ValueError: a file that should hold it is damaged, or holds several and none is the default.
    """
    for folder in (tokenizer.folder, model_folder):
        found = None if folder is None else _read_template(folder)
        if folder is not None and found is not None:
            # A folder knows some that a SentencePiece model does not. Where both know one, the ids are the tokenizer's.
            specials = {**_special_tokens(folder), **tokenizer.special_texts}
            return TemplateChat(tokenizer, found.text, specials, f"the template in {found.path}")
    return PlainChat(tokenizer)


class _Template(NamedTuple):
    text: str
    path: Path


def _read_template(folder: Path) -> _Template | None:
    if (folder / TEMPLATE).is_file():
        return _Template((folder / TEMPLATE).read_text(encoding="utf-8"), folder / TEMPLATE)
    template = _read_json(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        template = _default_template({entry["name"]: entry["template"] for entry in template}, folder)
    return None if template is None else _Template(template, folder / CONFIG)


def _default_template(named: Mapping[str, str], folder: Path) -> str:
    if "default" not in named:
        raise ValueError(
            f"of several chat templates one must be named 'default'; {folder / CONFIG} has {sorted(named)}. "
            f"Write the one to use to {folder / TEMPLATE}."
        )
    return named["default"]


def _special_tokens(folder: Path) -> dict[str, int]:
    """Text and id of the tokens that stand for no text."""
    added = _read_json(folder / "tokenizer.json").get("added_tokens", [])
    decoder = _read_json(folder / CONFIG).get("added_tokens_decoder", {})
    every = [*added, *({"id": int(index), **token} for index, token in decoder.items())]
    return {token["content"]: token["id"] for token in every if token.get("special", True)}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path, "a tokenizer")


def _environment() -> Any:
    """Jinja as transformers sets it up for its templates, shut off from Python."""
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
    """The extension for ``{% generation %}``, in which templates write an assistant's turn: its text as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012 (so that Jinja finds it)

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
    """Jinja's own would escape what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
