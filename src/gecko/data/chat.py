"""Convert conversations to tokens with the chat template of the tokenizer, or with a plain format.

A conversation is read as a whole (``encode``), continued after an answer whose tokens a state has read
(``continuation``), or divided into the tokens that a model learns and those that it only reads (``trained_pieces``).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gecko.data.tokenizers import TokenIds, Tokenizer
from gecko.io.files import read_object
from gecko.runtime.process import require

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_MARK = "\ue000"
"""Begins what replaces a part of a message while the template is rendered."""
_ITSELF, _BREAK, _STAND_INS = _MARK + "\ue001", _MARK + "\ue002", 0xF0000
"""Replacement of the mark itself; what divides special tokens; first of the characters that, after a mark, replace
special tokens of one character, which cannot be divided."""

_LONGEST = 300
"""Characters of a template's message that an error quotes."""
_PART = 1 << 16
"""Characters of a message that are processed in one call, which holds the GIL until it returns."""


def encode_text(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Encode one text with ``encode_batch``: ``encode`` of the library holds the GIL, for seconds with long texts."""
    return _encode_texts(tokenizer, [text])[0]


def _encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenIds]:
    try:
        return tokenizer.encode_batch(texts)
    except (TypeError, UnicodeEncodeError) as error:  # libraries of tokenizers say that it is no text
        raise ValueError("a text must be Unicode; got half of a surrogate pair, which UTF-8 cannot write") from error


class Message(Protocol):
    """One turn of a conversation."""

    @property
    def role(self) -> str:
        """``system``, ``user`` or ``assistant``; servers also accept ``developer``."""

    @property
    def content(self) -> str: ...


class Turn(NamedTuple):
    """A ``Message``."""

    role: str
    content: str
    learned: bool = True
    """Whether fine-tuning learns it, if it is an answer."""


class ChatFormat(Protocol):
    """Format of conversations."""

    @property
    def source(self) -> str:
        """Description of its origin, for the log."""

    @property
    def tuned(self) -> bool:
        """Whether the model has a chat template. Models without one were not tuned for chat."""

    @property
    def stops(self) -> Sequence[str]:
        """Stop strings of an answer."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Stop tokens of an answer."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the prompt for the answer; ValueError if the conversation does not fit the format."""

    def continuation(self, messages: Sequence[Message]) -> Continuation:
        """Return the ids that follow an answer; ValueError if ``messages`` do not fit the format there.

        They depend on nothing before the answer, so that a state of constant size can stand for it.
        """


class Continuation(NamedTuple):
    """Ids between an answer and the next one."""

    closing: list[int]
    """End of the answer."""
    turns: list[int]
    """The next messages, and the beginning of the next answer; empty without messages."""


DEFAULT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- {'system': 'System', 'developer': 'System', 'user': 'User', 'assistant': 'Assistant'}[message.role] + ':\n' -}}
{{- message.content | trim -}}
{{- (eos_token if message.role == 'assistant' else '') + '\n\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:\n' -}}{%- endif -%}
"""
"""Template that fine-tuning gives to models whose tokenizer has none. The document end closes every answer."""


class PlainChat:
    """Format for models without a template: role, colon and text per message, separated by empty lines.

    The answer ends where the model starts the next message.
    """

    source = "the form User: … Assistant: …, as no chat template was found"
    tuned = False
    stops = ("\n\nUser:", "\n\nSystem:")
    _names: Mapping[str, str] = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = frozenset({tokenizer.document_end})

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return [self._tokenizer.document_start, *self._encode(messages)]

    def continuation(self, messages: Sequence[Message]) -> Continuation:
        closing = encode_text(self._tokenizer, "\n\n").tolist()
        return Continuation(closing, self._encode(messages) if messages else [])

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        said = (f"{self._names[message.role]}: {message.content.strip()}\n\n" for message in messages)
        return encode_text(self._tokenizer, "".join(said) + "Assistant:").tolist()


class TemplateChat:
    """Jinja template of a Hugging Face tokenizer.

    Special tokens of the template become their ids. The same characters in a message stay text, so a message cannot end
    its turn or imitate another role. Every special token ends an answer, because the token that closes a turn often
    differs from the one that ends a document.

    Args:
        source: file of the template.
        now: the time that the template sees; None: that of the clock.

    Raises:
        ValueError: the template is not valid Jinja.
    """

    stops: Sequence[str] = ()
    tuned = True

    def __init__(
        self, tokenizer: Tokenizer, template: str, specials: Mapping[str, int], source: str, now: datetime | None = None
    ) -> None:
        self._tokenizer, self._specials, self.source = tokenizer, _Specials(specials), source
        self.text = template
        self.stop_ids = tokenizer.special_ids | frozenset(specials.values())
        texts = {index: text for text, index in specials.items()}
        self._names = {
            "bos_token": texts.get(tokenizer.document_start, ""),
            "eos_token": texts.get(tokenizer.document_end, ""),
        }
        require("jinja2", "chat")
        from gecko.data.jinja import environment, render

        try:
            self._render_template = partial(render, environment(now).from_string(template))
        except Exception as error:  # Jinja raises TemplateError, and Python whatever it raises for nested code
            raise ValueError(f"the chat template must be valid Jinja; {error}") from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """See ``ChatFormat``. The prompt ends with all that the template writes before the text of an answer."""
        text = self._prompt(messages)
        self._outline(messages, [place for place, said in enumerate(messages) if said.role in ("system", "developer")])
        return self._encode(self._specials.split(text))

    def continuation(self, messages: Sequence[Message]) -> Continuation:
        """Render a short conversation that ends in an answer, and cut it after that and after the end of the answer."""
        before = [Turn("user", "."), answer := Turn("assistant", _new_mark())]
        text = self._prompt([*before, *messages]) if messages else self._rendered(before, generate=False)
        self._outline([*before, *messages], range(1, 2 + len(messages)))
        parts = list(self._specials.split(text.partition(answer.content)[2]))
        end = self._end(parts)
        return Continuation(self._encode(parts[:end]), self._encode(parts[end:]) if messages else [])

    def trained_pieces(self, messages: Sequence[Turn]) -> Iterator[tuple[list[int], bool]]:
        """Yield the ids of a conversation up to its last learned answer in pieces, and whether a model learns a piece.

        It learns the text of answers, each with the special token that ends it. The pieces are cut where generation
        cuts them: a prompt ends where its answer begins.

        Raises:
            ValueError: the conversation does not fit the template, the template changes or loses a message, or no
                special token ends an answer.
        """
        learned = [place for place, turn in enumerate(messages) if turn.role == "assistant" and turn.learned]
        text, spans = self._spans(messages[: learned[-1] + 1], learned)
        prompt = self._prompt(messages[: learned[-1]])
        space = text[len(prompt) : spans[learned[-1]][0]]
        if not text.startswith(prompt) or space.strip():
            raise ValueError(
                f"the chat template must begin answers as it asks for them; {self.source} does not, or changes earlier "
                "turns in another way when an answer follows. Change the template."
            )
        # Spaces that the prompt for an answer leaves out are written by the model.
        begins = [spans[place][0] - len(space) * text.endswith(space, 0, spans[place][0]) for place in learned]
        held = list(self._specials.split(text[: begins[0]]))
        for place, (begin, limit) in zip(learned, pairwise([*begins, len(text)]), strict=True):
            yield self._encode(held), False
            parts = list(self._specials.split(text[begin:limit]))
            end = self._end(parts)
            if not end or "".join(map(str, parts[: end - 1])).strip() != messages[place].content.strip():
                raise ValueError(
                    "the chat template must end every answer with a special token, or a model would not learn to "
                    f"stop; {self.source} does not. Add eos_token after the content of the assistant's messages."
                )
            yield self._encode(parts[:end]), True
            held = parts[end:]

    def _prompt(self, messages: Sequence[Message]) -> str:
        """Render the prompt for an answer, with what the template writes between it and the text of an answer."""
        return self._rendered(messages) + self._header

    @cached_property
    def _header(self) -> str:
        answered = [Turn("user", "."), answer := Turn("assistant", _new_mark())]
        try:
            asked, unasked = (self._rendered(answered[:1], generate=generate) for generate in (True, False))
            before = self._rendered(answered, generate=False).partition(answer.content)[0]
        except ValueError:
            return ""
        more = before.removeprefix(asked)
        return more if asked != unasked and more != before and more.strip() else ""

    def _spans(self, messages: Sequence[Turn], learned: Collection[int]) -> tuple[str, dict[int, tuple[int, int]]]:
        """Return the rendering of a conversation, and the beginning and end of each message in it.

        Answers that are not learned may be changed by the template, and have no place.
        """
        marked = [place for place, turn in enumerate(messages) if turn.role != "assistant" or place in learned]
        first, *outline = self._outline(messages, marked)
        text = self._rendered(messages, generate=False)
        at, spans = len(first), dict[int, tuple[int, int]]()
        for place, following in zip(map(int, outline[::2]), outline[1::2], strict=True):
            found = _find(self._specials.protect(messages[place].content), text, at, following)
            if not text.startswith(first) or found is None or (place in learned and place in spans):
                raise ValueError(
                    f"the chat template must write every message as it is, and an answer once; {self.source} changes "
                    f"the message of {messages[place].role!r} that begins {messages[place].content[:40]!r}. Change the "
                    "template, or give answers that it changes the weight 0."
                )
            spans[place] = found
            at = found[1] + len(following)
        return text, spans

    def _outline(self, messages: Sequence[Message], marked: Iterable[int]) -> list[str]:
        """Render a conversation without its ``marked`` messages: texts, and between them the places of messages.

        Raises:
            ValueError: the template leaves a message out.
        """
        # An empty message may be left out, unless a model learns that it is empty.
        shown = {place for place in marked if messages[place].content.strip() or messages[place].role == "assistant"}
        mark, said = _new_mark(), enumerate(messages)
        contents = [f"{mark}{n:09}" if n in shown else self._specials.protect(message.content) for n, message in said]
        parts = re.split(rf"{mark}(\d{{9}})", self._render(messages, contents, generate=False)) if shown else [""]
        if lost := shown.difference(map(int, parts[1::2])):
            raise ValueError(
                f"the chat template has no place for a message of {messages[min(lost)].role!r} there; {self.source} "
                "leaves it out. Leave the message out, or change the template."
            )
        return parts

    def _end(self, parts: Sequence[str | int]) -> int:
        """Return the number of parts up to the special token that ends an answer; 0 if there is none."""
        return next((place + 1 for place, part in enumerate(parts) if part in self.stop_ids), 0)

    def _rendered(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        return self._render(messages, [self._specials.protect(said.content) for said in messages], generate=generate)

    def _render(self, messages: Sequence[Message], contents: Sequence[str], *, generate: bool) -> str:
        spoken = [{"role": said.role, "content": text} for said, text in zip(messages, contents, strict=True)]
        try:
            return self._render_template(spoken, add_generation_prompt=generate, **self._names)
        except Exception as error:  # a template is a program and may raise anything
            roles = ", ".join(message.role for message in messages) or "none"
            raise ValueError(
                f"the model's chat template refuses these messages: {str(error)[:_LONGEST]} (roles of the messages: "
                f"{roles[:_LONGEST]}). It may need other roles, or another order."
            ) from error

    def _encode(self, parts: Iterable[str | int]) -> list[int]:
        # Neighbouring texts are encoded together, as one text.
        groups = [(kind, list(group)) for kind, group in groupby(parts, key=type)]
        texts = ["".join(map(str, group)) for kind, group in groups if kind is str]
        encoded = iter(_encode_texts(self._tokenizer, texts))
        ids: list[int] = []
        for kind, group in groups:
            ids += next(encoded).tolist() if kind is str else map(int, group)
        return ids


def _find(content: str, text: str, at: int, following: str) -> tuple[int, int] | None:
    """Return where ``text`` from ``at`` on holds ``content``, without spaces at its ends if need be, and ``following``.

    None: it holds something else there.
    """
    core, lead, trail = content.strip(), content[: -len(content.lstrip()) or None], content[len(content.rstrip()) :]
    if (begin := text.find(core, at, at + len(content))) < 0 or not lead.endswith(text[at:begin]):
        return None
    ends = range(begin + len(core), begin + len(core) + len(trail) + 1)
    fitting = (end for end in ends if trail.startswith(text[ends[0] : end]) and text.startswith(following, end))
    return next(((at, end) for end in fitting), None)


def _new_mark() -> str:
    """Return a text that no message contains: digits, which are the same in capitals."""
    return str(secrets.randbits(128) | 1 << 127)


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
        self._hidden = {letter: _MARK + chr(_STAND_INS + index) for index, letter in enumerate(letters)}
        self._hidden[ord(_MARK)] = _ITSELF

    def protect(self, text: str) -> str:
        """Mark a message so that ``split`` finds no special token in it; ``split`` removes the marks."""
        borders = [0, *(start + 1 for start in self._starts(text)), len(text)]
        return _BREAK.join(_translate(text[begin:end], self._hidden) for begin, end in pairwise(borders))

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
        text = text.replace(_BREAK, "")
        for letter, hidden in self._hidden.items():  # the mark itself comes last
            text = text.replace(hidden, chr(letter))
        return [text] if text else []


def _translate(text: str, table: Mapping[int, str]) -> str:
    return "".join(text[begin : begin + _PART].translate(table) for begin in range(0, len(text), _PART))


def find_format(tokenizer: Tokenizer, model_folder: Path, now: datetime | None = None) -> ChatFormat:
    """Return the template in the folder of the tokenizer, else the one in the folder of the model, else the plain
    format. ``now`` is the time that templates see; None: that of the clock.

    Raises:
        ValueError: a file is damaged, or has several templates and none is named ``default``.
    """
    found = find_template(tokenizer, model_folder)
    if found is None:
        return PlainChat(tokenizer)
    # The folder may have special tokens that a SentencePiece model lacks; the ids of the tokenizer win.
    specials = {**_special_tokens(found.path.parent), **tokenizer.special_texts}
    return TemplateChat(tokenizer, found.text, specials, f"the template in {found.path}", now)


def find_template(tokenizer: Tokenizer, model_folder: Path) -> Template | None:
    """Return the template in the folder of the tokenizer, else the one in the folder of the model, else None.

    Errors are those of ``find_format``.
    """
    folders = (folder for folder in (tokenizer.folder, model_folder) if folder is not None)
    return next((found for folder in folders if (found := _read_template(folder)) is not None), None)


def tuning_format(tokenizer: Tokenizer, model_folder: Path, now: datetime | None = None) -> TemplateChat:
    """Return the template that ``find_format`` finds for fine-tuning, or ``DEFAULT_TEMPLATE`` if there is none."""
    found = find_format(tokenizer, model_folder, now)
    if isinstance(found, TemplateChat):
        return found
    return TemplateChat(tokenizer, DEFAULT_TEMPLATE, tokenizer.special_texts, "gecko's own chat template")


class Template(NamedTuple):
    """A chat template and the file that holds it."""

    text: str
    path: Path


def _read_template(folder: Path) -> Template | None:
    if (folder / TEMPLATE).is_file():
        return Template(_read_text(folder / TEMPLATE), folder / TEMPLATE)
    template = _read_json(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        with _naming(folder / CONFIG):
            named = {str(entry["name"]): entry["template"] for entry in template}
        template = _default_template(named, folder)
    if not isinstance(template, str | None):
        raise ValueError(f"{folder / CONFIG} must hold a chat_template that is text; got a {type(template).__name__}.")
    return None if template is None else Template(template, folder / CONFIG)


def _default_template(named: Mapping[str, Any], folder: Path) -> Any:
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


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must hold a chat template as UTF-8 text; {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path, "a tokenizer")
