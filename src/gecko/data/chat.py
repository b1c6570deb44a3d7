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
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gecko.data.tokenizers import SETTINGS, TEMPLATE, TOKENIZERS, TokenIds, Tokenizer
from gecko.data.turns import CALL_TEXTS, PLAIN_FORM, CallForm, Function, FunctionCall, Turn, form_of, plain_turns
from gecko.io.files import read_object
from gecko.runtime.process import require

_Conversation = tuple[Sequence[Turn], Sequence[Function]]
_LONGEST = 300  # characters of a template's message that an error quotes
_TOLD_ROLES = ("system", "developer", "tool")  # roles whose messages a template must not leave out


def encode_text(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Encode one text with ``encode_batch``: ``encode`` of the library holds the GIL, for seconds with long texts."""
    return _encode_texts(tokenizer, [text])[0]


def _encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenIds]:
    try:
        return tokenizer.encode_batch(texts)
    except (TypeError, UnicodeEncodeError) as error:  # libraries of tokenizers say that it is no text
        raise ValueError("a text must be Unicode; got half of a surrogate pair, which UTF-8 cannot write") from error


class Continuation(NamedTuple):
    """Ids between an answer and the next one."""

    closing: list[int]  # end of the answer
    turns: list[int]  # the next messages, and the beginning of the next answer; empty without messages


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
    """Description of the format's origin, for the log."""
    tuned = False
    """Whether the model has a chat template. Models without one were not tuned for chat."""
    stops: Sequence[str] = ("\n\nUser:", "\n\nSystem:")  # stop strings of an answer
    call_form = PLAIN_FORM
    """Form in which answers call functions; a template raises ValueError if a grammar could not enforce it."""
    call_marks: Mapping[str, int] = MappingProxyType({})
    """Special tokens in calls, which do not end an answer that may call functions: ids by their texts."""
    _names: Mapping[str, str] = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = frozenset({tokenizer.document_end})

    def encode(self, messages: Sequence[Turn], functions: Sequence[Function] = ()) -> list[int]:
        """Return the ids of the prompt for the answer, which may call ``functions``; ValueError if the conversation
        does not fit the format."""
        return [self._tokenizer.document_start, *self._encode(messages, functions)]

    def continuation(self, messages: Sequence[Turn]) -> Continuation:
        """Return the ids that follow an answer; ValueError if ``messages`` do not fit the format there.

        They depend on nothing before the answer, so that a state of constant size can stand for it.
        """
        return Continuation(self.encode_answer("\n\n"), self._encode(messages) if messages else [])

    def encode_answer(self, text: str) -> list[int]:
        """Return the ids of a text that a model wrote in an answer, with ``call_marks``."""
        return encode_text(self._tokenizer, text).tolist()

    def _encode(self, messages: Sequence[Turn], functions: Sequence[Function] = ()) -> list[int]:
        turns = plain_turns(messages, functions)
        said = "".join(f"{self._names[turn.role]}: {turn.content.strip()}\n\n" for turn in turns)
        return self.encode_answer(said + "Assistant:")


class TemplateChat:
    """Jinja template of a Hugging Face tokenizer.

    Special tokens of the template become their ids. The same characters in a message stay text, so a message cannot end
    its turn or imitate another role. Every special token ends an answer, because the token that closes a turn often
    differs from the one that ends a document. ``source`` names the template, and ``now`` is the time that it sees, None
    that of the clock. Raise ValueError if the template is not valid Jinja.
    """

    stops: Sequence[str] = ()
    tuned = True

    def __init__(
        self, tokenizer: Tokenizer, template: str, specials: Mapping[str, int], source: str, now: datetime | None = None
    ) -> None:
        require("jinja2", "chat")
        from gecko.data.chat_templates import SpecialTokens, environment, render

        self._tokenizer, self._specials = tokenizer, SpecialTokens(specials)
        self.source, self.text = source, template
        self.stop_ids = tokenizer.special_ids | frozenset(specials.values())
        texts = {index: text for text, index in specials.items()}
        start, end = (texts.get(index, "") for index in (tokenizer.document_start, tokenizer.document_end))
        self._names = {"bos_token": start, "eos_token": end}
        try:
            self._render_template = partial(render, environment(now).from_string(template))
        except Exception as error:  # Jinja raises TemplateError, and Python whatever it raises for nested code
            raise ValueError(f"the chat template must be valid Jinja; {error}") from error

    def encode(self, messages: Sequence[Turn], functions: Sequence[Function] = ()) -> list[int]:
        """Encode as ``PlainChat.encode``. The prompt ends where the text of an answer begins."""
        messages, functions = self._known(messages, functions)
        text = self._prompt(messages, functions)
        self._outline(messages, [place for place, said in enumerate(messages) if said.role in _TOLD_ROLES], functions)
        return self._encode(self._specials.split(text))

    def encode_answer(self, text: str) -> list[int]:
        texts = re.split(f"({'|'.join(map(re.escape, self.call_marks))})", text) if self.call_marks else [text]
        return self._encode(self.call_marks.get(part, part) for part in texts if part)

    def continuation(self, messages: Sequence[Turn]) -> Continuation:
        """Render a short conversation that ends in an answer, and cut it after that and after the end of the answer."""
        messages, _ = self._known(messages)
        before = [Turn("user", "."), answer := Turn("assistant", _new_mark())]
        text = self._prompt([*before, *messages]) if messages else self._rendered(before, generate=False)
        self._outline([*before, *messages], range(1, 2 + len(messages)))
        parts = list(self._specials.split(text.partition(answer.content)[2]))
        end = self._end(parts)
        return Continuation(self._encode(parts[:end]), self._encode(parts[end:]) if messages else [])

    def _known(self, messages: Sequence[Turn], functions: Sequence[Function] = ()) -> _Conversation:
        """Return a conversation that the template knows how to write: without functions if it knows none."""
        used = functions or any(turn.calls or turn.role == "tool" for turn in messages)
        return (plain_turns(messages, functions), ()) if used and not self._knows_functions else (messages, functions)

    @cached_property
    def _knows_functions(self) -> bool:
        probe = _probe()
        try:
            return probe.name in self._rendered([Turn("user", ".")], [probe])
        except ValueError:
            return False

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template writes an answer that is a call; see ``PlainChat.call_form``."""
        if not self._knows_functions:
            return PLAIN_FORM
        probe, asked, answer = _probe(), [Turn("user", ".")], Turn("assistant", _new_mark())
        call = FunctionCall(probe.name, {"x": 1}, "0" * 9)
        prompt = self._prompt(asked, [probe])
        text = self._rendered([*asked, Turn("assistant", "", calls=(call,))], [probe], generate=False)
        ending = self._rendered([*asked, answer], generate=False).partition(answer.content)[2]
        if text.startswith(prompt) and (found := form_of(text.removeprefix(prompt), call, ending)):
            return found
        raise ValueError(
            "the chat template must write a call of a function as a JSON object with its name and arguments; "
            f"{self.source} writes another form, which is not read"
        )

    @cached_property
    def call_marks(self) -> Mapping[str, int]:
        written = (*CALL_TEXTS, self.call_form.opening, self.call_form.closing)
        return {text: index for text, index in self._specials.ids.items() if any(text in one for one in written)}

    def trained_pieces(
        self, messages: Sequence[Turn], functions: Sequence[Function] = ()
    ) -> Iterator[tuple[list[int], bool]]:
        """Yield the ids of a conversation up to its last learned answer in pieces, and whether a model learns a piece.

        It learns the text of answers with their calls, each with the special token that ends it. The pieces are cut
        where generation cuts them: a prompt ends where its answer begins. Raise ValueError if the conversation does not
        fit the template, the template changes or loses a message, or no special token ends an answer.
        """
        messages, functions = self._known(messages, functions)
        learned = [place for place, turn in enumerate(messages) if turn.role == "assistant" and turn.learned]
        text, spans = self._spans(messages[: learned[-1] + 1], learned, functions)
        written = [place for place in learned if not messages[place].calls][-1:]
        # Spaces that the prompt for an answer leaves out are written by the model.
        space = "".join(text[self._asked(text, messages[:n], functions, spans[n][0]) : spans[n][0]] for n in written)
        begins = [
            self._asked(text, messages[:place], functions) if messages[place].calls
            else spans[place][0] - len(space) * text.endswith(space, 0, spans[place][0])
            for place in learned
        ]  # fmt: skip
        held = list(self._specials.split(text[: begins[0]]))
        for place, (begin, limit) in zip(learned, pairwise([*begins, len(text)]), strict=True):
            yield self._encode(held), False
            parts = list(self._specials.split(text[begin:limit]))
            end = self._end(parts, self.call_marks.values() if messages[place].calls else ())
            whole = end and messages[place].is_written("".join(map(str, parts[: end - 1])))
            if end and not whole and messages[place].calls:
                raise self._changed(messages[place])
            if not whole:
                raise ValueError(
                    "the chat template must end every answer with a special token, or a model would not learn to "
                    f"stop; {self.source} does not. Add eos_token after the content of the assistant's messages."
                )
            yield self._encode(parts[:end]), True
            held = parts[end:]

    def _asked(
        self, text: str, messages: Sequence[Turn], functions: Sequence[Function], begin: int | None = None
    ) -> int:
        """Return where the prompt for the answer after ``messages`` ends in ``text``.

        The text of the answer begins with ``begin``, after spaces; None: at once.
        """
        prompt = self._prompt(messages, functions)
        if not text.startswith(prompt) or text[len(prompt) : begin or len(prompt)].strip():
            raise ValueError(
                f"the chat template must begin answers as it asks for them; {self.source} does not, or changes earlier "
                "turns in another way when an answer follows. Change the template."
            )
        return len(prompt)

    def _prompt(self, messages: Sequence[Turn], functions: Sequence[Function] = ()) -> str:
        """Render the prompt for an answer, with what the template writes between it and the text of an answer."""
        return self._rendered(messages, functions) + self._header

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

    def _spans(
        self, messages: Sequence[Turn], learned: Collection[int], functions: Sequence[Function]
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        """Return the rendering of a conversation, and the beginning and end of each message in it.

        Answers that are not learned, calls and their results may be changed by the template, and have no place.
        """
        self._outline(messages, [place for place, turn in enumerate(messages) if turn.role == "tool"], functions)
        fixed = ("assistant", "tool")
        said = [(place in learned and not turn.calls) or turn.role not in fixed for place, turn in enumerate(messages)]
        first, *outline = self._outline(messages, np.flatnonzero(said), functions)
        text = self._rendered(messages, functions, generate=False)
        at, spans = len(first), dict[int, tuple[int, int]]()
        for place, following in zip(map(int, outline[::2]), outline[1::2], strict=True):
            found = _find(self._specials.protect(messages[place].content), text, at, following)
            if not text.startswith(first) or found is None or (place in learned and place in spans):
                raise self._changed(messages[place])
            spans[place] = found
            at = found[1] + len(following)
        return text, spans

    def _changed(self, message: Turn) -> ValueError:
        calls = " with calls" if message.calls else ""
        return ValueError(
            f"the chat template must write every message as it is, and an answer once; {self.source} changes the "
            f"message of {message.role!r}{calls} that begins {message.content[:40]!r}. Change the template, or give "
            "answers that it changes the weight 0."
        )

    def _outline(
        self, messages: Sequence[Turn], marked: Iterable[int], functions: Sequence[Function] = ()
    ) -> list[str]:
        """Render a conversation without its ``marked`` messages: texts, and between them the places of messages. Raise
        ValueError if the template leaves a message out."""
        # An empty message may be left out, unless a model learns that it is empty.
        shown = {place for place in marked if messages[place].content.strip() or messages[place].role == "assistant"}
        mark, said = _new_mark(), enumerate(messages)
        contents = [f"{mark}{n:09}" if n in shown else self._specials.protect(message.content) for n, message in said]
        text = self._rendered(messages, functions, contents, generate=False) if shown else ""
        parts = re.split(rf"{mark}(\d{{9}})", text)
        if lost := shown.difference(map(int, parts[1::2])):
            raise ValueError(
                f"the chat template has no place for a message of {messages[min(lost)].role!r} there; {self.source} "
                "leaves it out. Leave the message out, or change the template."
            )
        return parts

    def _end(self, parts: Sequence[str | int], inside: Collection[int] = ()) -> int:
        """Return the number of parts up to the special token that ends an answer, none of those ``inside`` of it.

        0 if there is none.
        """
        ends = self.stop_ids.difference(inside)
        return next((place + 1 for place, part in enumerate(parts) if part in ends), 0)

    def _rendered(
        self, messages: Sequence[Turn], functions: Sequence[Function] = (), contents: Sequence[str] | None = None, *,
        generate: bool = True,
    ) -> str:  # fmt: skip
        """Render a conversation, with other ``contents`` if they are given; with ``generate``, for an answer to it."""
        protect = self._specials.protect_all
        texts = [protect(said.content) for said in messages] if contents is None else contents
        spoken = [said.fields(text, protect) for said, text in zip(messages, texts, strict=True)]
        told = {"tools": [self._specials.protect_all(function.tool) for function in functions]} if functions else {}
        try:
            return self._render_template(spoken, add_generation_prompt=generate, **told, **self._names)
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


def _probe() -> Function:
    """Return a function whose name no template contains."""
    schema = {"type": "object", "properties": {"x": {"type": "integer", "description": "."}}}
    return Function(name=_new_mark(), description=".", parameters=schema)


def _new_mark() -> str:
    """Return a text that no message contains: digits, which are the same in capitals."""
    return str(secrets.randbits(128) | 1 << 127)


ChatFormat = PlainChat | TemplateChat


class Template(NamedTuple):
    """A chat template and the file that holds it."""

    text: str
    path: Path


def find_template(tokenizer: Tokenizer, model_folder: Path) -> Template | None:
    """Return the template in the folder of the tokenizer, else the one in the folder of the model, else None.

    Errors are those of ``find_format``.
    """
    folders = filter(None, (tokenizer.folder, model_folder))
    return next(filter(None, map(_read_template, folders)), None)


def _read_template(folder: Path) -> Template | None:
    own, config = folder / TEMPLATE, folder / SETTINGS[0]
    if own.is_file():
        try:
            return Template(own.read_text(encoding="utf-8"), own)
        except UnicodeDecodeError as error:
            raise ValueError(f"{own} must hold a chat template as UTF-8 text; {error}.") from error
    template = _read_json(config).get("chat_template")
    if isinstance(template, list):
        with _naming(config):
            named = {str(entry["name"]): entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(
                f"one of several chat templates must be named 'default'; {config} has {sorted(named)}. "
                f"Save the template to use as {own}."
            )
        template = named["default"]
    if not isinstance(template, str | None):
        raise ValueError(f"{config} must hold a chat_template that is text; got a {type(template).__name__}.")
    return None if template is None else Template(template, config)


def _special_tokens(folder: Path) -> dict[str, int]:
    added = _read_json(folder / TOKENIZERS[0]).get("added_tokens", [])
    decoder = _read_json(folder / SETTINGS[0]).get("added_tokens_decoder", {})
    with _naming(folder):
        every = [*added, *({"id": int(index), **token} for index, token in decoder.items())]
        if not all(isinstance(token["content"], str) for token in every):
            raise TypeError("the content of a token is no text")
        return {token["content"]: int(token["id"]) for token in every if token.get("special", True)}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} must hold a tokenizer; a field is missing or of another type: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, "a tokenizer") if path.is_file() else {}


def find_format(tokenizer: Tokenizer, model_folder: Path, now: datetime | None = None) -> ChatFormat:
    """Return the template in the folder of the tokenizer, else the one in the folder of the model, else the plain
    format. ``now`` is the time that templates see; None: that of the clock. Raise ValueError if a file is damaged, or
    has several templates and none is named ``default``."""
    found = find_template(tokenizer, model_folder)
    if found is None:
        return PlainChat(tokenizer)
    # The folder may have special tokens that a SentencePiece model lacks; the ids of the tokenizer win.
    folder, own = found.path.parent, tokenizer.special_texts
    specials = {**_special_tokens(folder), **own}
    for text, index in specials.items() - own.items():
        if index < 0 or (index < tokenizer.vocab_size and tokenizer.piece(index) != text):
            raise ValueError(f"the special token {text!r} of {folder} must have an id of its own; got {index}.")
    return TemplateChat(tokenizer, found.text, specials, f"the template in {found.path}", now)


def tuning_format(tokenizer: Tokenizer, model_folder: Path, now: datetime | None = None) -> TemplateChat:
    """Return the template that ``find_format`` finds for fine-tuning, or ``DEFAULT_TEMPLATE`` if there is none."""
    found = find_format(tokenizer, model_folder, now)
    if isinstance(found, TemplateChat):
        return found
    return TemplateChat(tokenizer, DEFAULT_TEMPLATE, tokenizer.special_texts, "gecko's own chat template")
