"""Conversations to prompts: by the tokenizer's own chat template, or by a plain default."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

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

    Raises:
        ValueError: the template is none.
    """

    stops: Sequence[str] = ()

    def __init__(self, tokenizer: Tokenizer, template: str, specials: Mapping[str, int]) -> None:
        self._tokenizer, self._specials = tokenizer, _Specials(specials)
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
        ValueError: a file that should hold it is damaged.
    """
    file = Path(tokenizer.name)
    for folder in ([file.parent] if file.is_file() else []) + [model_folder]:
        template = _read_template(folder)
        if template is not None:
            # A folder knows some that a SentencePiece model does not. Where both know one, the ids are the tokenizer's.
            return TemplateChat(tokenizer, template, {**_special_tokens(folder), **tokenizer.special_texts})
    return PlainChat(tokenizer)


def _read_template(folder: Path) -> str | None:
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    template = _read_json(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


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
    """Jinja as the templates expect it, shut off from Python."""
    require("jinja2", "serve")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment
