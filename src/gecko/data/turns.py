"""Conversations: their messages, the functions that a model may call, and its calls.

``plain_turns`` writes functions and calls as text, for chat templates that know none.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from gecko.records import FieldError, Parsed, convert

MAX_FUNCTIONS = 128  # maximum number of functions of one conversation, as in the API of OpenAI
MAX_JSON = 1 << 18
"""Maximum number of characters of all functions of a conversation, and of the arguments of one call."""
_MAX_DEPTH = 32
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DECODER = json.JSONDecoder()
_NO_ARGUMENTS = {"type": "object", "properties": {}}


def _function_name(value: Any, name: str, texts: bool) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise FieldError(f"{name} must have 1 to 64 letters, digits, '_' and '-'; got {reprlib.repr(value)}", name)
    return value


def _parameters(value: Any, name: str, texts: bool) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise FieldError(f"{name} must be the JSON schema of an object; got {reprlib.repr(value)}", name)
    return _shallow(value, name)


def _arguments(value: Any, name: str, texts: bool) -> dict[str, Any]:
    found = value
    if isinstance(value, str) and len(value) <= MAX_JSON:
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
    if not isinstance(found, dict):
        rule = f"must be a JSON object, or the text of one of at most {MAX_JSON:,} characters"
        raise FieldError(f"{name} {rule}; got {reprlib.repr(value)}", name)
    return _shallow(found, name)


def _shallow(value: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a value of JSON; FieldError if it is nested deep."""
    inner: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
        inner = [part for part in inner if isinstance(part, dict | list)]
    if inner:
        raise FieldError(f"{name} must be nested at most {_MAX_DEPTH} deep", name)
    return value


FunctionName = Annotated[str, Parsed(_function_name)]
Arguments = Annotated[dict[str, Any], Parsed(_arguments)]  # an object, or the text of one


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function that a model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], Parsed(_parameters)] | None = None  # JSON schema of the arguments
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Schema of the object of arguments."""
        return {"type": "object", **self.parameters} if self.parameters else _NO_ARGUMENTS

    @property
    def tool(self) -> dict[str, Any]:
        """The function as chat templates take it."""
        told = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **told, "parameters": self.schema}}


@dataclass(frozen=True, kw_only=True)
class FunctionTool(Function):
    """A function in the form of ``/v1/responses``."""

    type: Literal["function"]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function in the form of chats."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, kw_only=True)
class CalledFunction:
    """Name and arguments of a call."""

    name: FunctionName
    arguments: Arguments


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call in the form of chats."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # ignored: parts of calls in a stream have it

    @property
    def call(self) -> FunctionCall:
        return FunctionCall(self.function.name, self.function.arguments, self.id)


class FunctionCall(NamedTuple):
    """A call of a function by the model."""

    name: str
    arguments: dict[str, Any]
    id: str = ""

    def is_written(self, found: dict[str, Any]) -> bool:
        """Return whether an object in a text is this call."""
        return found.get("name") == self.name and self.arguments in found.values()


class Turn(NamedTuple):
    """One message of a conversation."""

    role: str  # system, user, assistant or tool; servers also accept developer
    content: str
    learned: bool = True  # whether fine-tuning learns it, if it is an answer
    calls: tuple[FunctionCall, ...] = ()  # calls of functions at the end of an answer
    call_id: str = ""  # the call whose result a message of the role tool is
    name: str = ""  # name of the function of that call

    def fields(self, content: str, protect: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the message as chat templates take it, with this ``content`` and other texts by ``protect``."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": protect(call.arguments)}}
            for call in self.calls
        ]
        others = {"tool_calls": calls, "tool_call_id": self.call_id, "name": self.name}
        return {"role": self.role, "content": content, **{name: value for name, value in others.items() if value}}

    def is_written(self, text: str) -> bool:
        """Return whether ``text`` is the content of the message, with spaces around it, or has it and the calls."""
        if not self.calls:
            return text.strip() == self.content.strip()
        return self.content.strip() in text and all(
            any(call.is_written(found) for found, _, _ in _objects(text)) for call in self.calls
        )


def read_functions(value: Any, name: str, texts: bool = False) -> list[Function]:
    """Return the functions of a conversation, the field ``name``, in the form of chats or of ``/v1/responses``. Raise
    FieldError if a function is of another form, there are too many, two have one name, or they are too large."""
    if not isinstance(value, list) or len(value) > MAX_FUNCTIONS:
        got = f"{len(value):,}" if isinstance(value, list) else reprlib.repr(value)
        raise FieldError(f"{name} must be a list of at most {MAX_FUNCTIONS} functions; got {got}", name)
    flat = [isinstance(one, dict) and "name" in one and "function" not in one for one in value]
    kinds = [FunctionTool if is_flat else Tool for is_flat in flat]
    read = [convert(one, kind, f"{name}.{index}") for index, (one, kind) in enumerate(zip(value, kinds, strict=True))]
    functions: list[Function] = [one.function if isinstance(one, Tool) else one for one in read]
    known = Counter(function.name for function in functions)
    if known and (most := known.most_common(1)[0])[1] > 1:
        raise FieldError(f"{name} must have different names; got {most[1]} of the name {most[0]!r}", name)
    size = sum(len(json.dumps(function.tool)) for function in functions)
    if size > MAX_JSON:
        raise FieldError(f"{name} must have at most {MAX_JSON:,} characters as JSON; got {size:,}", name)
    return functions


def linked(turns: Sequence[Turn], name: str, known: Mapping[str, str] | None = MappingProxyType({})) -> list[Turn]:
    """Return the turns of the field ``name``, with the names of functions beside their results.

    A result without an id is that of the first call of the newest calls that has none yet. Raise FieldError if a result
    belongs to no call, or two calls of an answer have one id. ``known`` has the names of functions by the ids of calls
    before these turns; None: there may be any.
    """
    names, found, waiting = dict(known or {}), list[Turn](), list[FunctionCall]()
    for place, turn in enumerate(turns):
        if turn.role == "tool":
            mine = next((i for i, call in enumerate(waiting) if turn.call_id in ("", call.id)), None)
            if known is not None and mine is None and turn.call_id not in names:
                field, got = f"{name}.{place}.tool_call_id", reprlib.repr(turn.call_id)
                raise FieldError(f"{field} must be the id of a call in an earlier message; got {got}", field)
            called = names.get(turn.call_id, "") if mine is None else waiting.pop(mine).name
            turn = turn._replace(name=turn.name or called)
        if turn.calls:
            given = Counter(call.id for call in turn.calls if call.id)
            if given and (most := given.most_common(1)[0])[1] > 1:
                field = f"{name}.{place}.tool_calls"
                raise FieldError(f"{field} must have different ids; got {most[1]} of the id {most[0]!r}", field)
            waiting = [*(waiting if found and found[-1].calls else []), *turn.calls]
            names |= {call.id: call.name for call in turn.calls if call.id}
        found.append(turn)
    return found


class CallForm(NamedTuple):
    """Text of a call: ``opening``, a JSON object with the name of the function and its arguments, and ``closing``."""

    opening: str
    arguments: str  # name of the field with the arguments
    closing: str


PLAIN_FORM = CallForm("<tool_call>\n", "arguments", "\n</tool_call>")
"""Form of Hermes and Qwen, also where the chat template knows no functions."""
CALL_OPENINGS, CALL_CLOSING = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"), "</tool_call>"
CALL_TEXTS = (*CALL_OPENINGS, CALL_CLOSING)
"""Texts around calls in the forms in use. Special tokens of these names do not end answers that may call functions."""
_TOLD = """\
You may call functions to answer the user. This is a list of them with the JSON schemas of their arguments:
<tools>
{}
</tools>

To call a function, write its name and arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": <name of the function>, "arguments": <JSON object of arguments>}}
</tool_call>"""


def form_of(text: str, call: FunctionCall, ending: str) -> CallForm | None:
    """Return the form in which ``text`` has a call in place of an answer; None if it is no object with its fields.

    ``ending`` ends every answer.
    """
    for found, begin, end in _objects(text):
        if call.is_written(found):
            field = next(name for name, value in found.items() if value == call.arguments)
            ends = bool(ending) and ending in text[end:]
            return CallForm(text[:begin], field, text[end:].partition(ending)[0] if ends else "")
    return None


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the JSON objects in a text, also those inside of others, each with its beginning and end."""
    for found in re.finditer(r"\{", text):
        try:
            value, end = _DECODER.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            continue
        yield value, found.start(), end


def plain_turns(turns: Sequence[Turn], functions: Sequence[Function]) -> list[Turn]:
    """Return a conversation with its functions, calls and results as text: for templates that do not know them.

    Functions are told in the system message, and results by the user.
    """
    found: list[Turn] = []
    if functions:
        told = _TOLD.format("\n".join(json.dumps(function.tool, ensure_ascii=False) for function in functions))
        begins = bool(turns) and turns[0].role in ("system", "developer")
        before = f"{turns[0].content}\n\n" if begins else ""
        found.append(Turn(turns[0].role if begins else "system", before + told))
        turns = turns[begins:]
    follows = False
    for turn in turns:
        if turn.role == "tool":
            result = f"The result of {turn.name or 'the function'} is: {turn.content}"
            if follows:
                result = f"{found.pop().content}\n{result}"
            found.append(Turn("user", result))
        else:
            objects = [{"name": call.name, PLAIN_FORM.arguments: call.arguments} for call in turn.calls]
            written = (json.dumps(one, ensure_ascii=False) for one in objects)
            calls = [f"{PLAIN_FORM.opening}{text}{PLAIN_FORM.closing}" for text in written]
            found.append(Turn(turn.role, "\n".join(filter(None, [turn.content, *calls])), turn.learned))
        follows = turn.role == "tool"
    return found
