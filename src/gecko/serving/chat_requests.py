"""Requests of OpenAI's API for chats and responses, whose answers may call functions, and those for tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from gecko.data.turns import (
    Arguments,
    Function,
    FunctionCall,
    FunctionName,
    FunctionTool,
    Tool,
    ToolCall,
    Turn,
    linked,
    read_functions,
)
from gecko.records import FieldError
from gecko.serving import fields
from gecko.serving.protocol import ChoicesRequest, GenerationRequest, TextFormat, TopLogprobs, Unsupported

_UNSUPPORTED_IN_CHATS = {
    name: found for name, found in GenerationRequest.unsupported.items() if name not in ("tools", "tool_choice")
}
_IGNORED_IN_RESPONSES = frozenset(
    {
        "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "truncation",
        "max_tool_calls", "stream_options",
    }
)  # fmt: skip
_UNSUPPORTED_IN_RESPONSES: Unsupported = {
    "background": ((False,), "the server answers while the client waits"),
    "conversation": ((), "continue a response with previous_response_id"),
    "prompt": ((), "give the text in input"),
    "reasoning": (({}, {"effort": "none"}), "the model does not reason apart from its text"),
    "include": (([],), "the output is text only"),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
}
Role = Literal["system", "developer", "user", "assistant"]
ChatRole = Literal["system", "developer", "user", "assistant", "tool"]
_MODES = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """``tool_choice`` of a request."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    """The function that must be called; None: any of them."""

    @property
    def shown(self) -> str | dict[str, str]:
        """The choice in the form of ``/v1/responses``."""
        return self.mode if self.name is None else {"type": "function", "name": self.name}


def _tool_choice(value: Any, name: str, texts: bool) -> ToolChoice:
    if value in _MODES:
        return ToolChoice(value)
    named = value.get("function", value) if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        rule = 'none, auto, required, or {"type": "function", "function": {"name": …}}'
        raise FieldError(f"{name} must be {rule}; other choices are not supported", name)
    return ToolChoice("required", named["name"])


Choice = Annotated[ToolChoice, fields.Json(_tool_choice, str | dict[str, Any])]
Functions = Annotated[list[Function], fields.Json(read_functions, list[Tool | FunctionTool])]


@dataclass(frozen=True, kw_only=True)
class ConversationRequest(GenerationRequest):
    """Fields of chats and responses."""

    tools: Functions = field(default_factory=list)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls of functions. One that must call a function has one call."""

    @property
    def functions(self) -> Sequence[Function]:
        return () if self.choice.mode == "none" else self.tools

    @property
    def enforced(self) -> Sequence[Function]:
        choice = self.choice
        named = [function for function in self.tools if choice.name in (None, function.name)]
        return named if choice.mode == "required" else ()

    @property
    def choice(self) -> ToolChoice:
        return self.tool_choice or ToolChoice()

    def turns(self, known: Mapping[str, str] | None) -> Sequence[Turn]:
        """Return the messages; ``known`` as for ``linked``, which raises FieldError if a result belongs to no call."""
        raise NotImplementedError

    def check_choice(self) -> None:
        """Raise FieldError if the chosen function is missing, or a constraint of the text forbids calls."""
        choice = self.choice
        if choice.mode == "required" and not self.enforced:
            known = ", ".join(function.name for function in self.tools[:20]) or "none"
            got = choice.mode if choice.name is None else repr(choice.name[:100])
            raise FieldError(f"tool_choice must be of the tools, which are {known}; got {got}", "tool_choice")
        if self.functions and not self.enforced and self.grammar() is not None:
            name = "structured_outputs" if self.structured_outputs else self.format_field
            rule = "must be left out beside tools unless tool_choice is none or required: a call does not match it"
            raise FieldError(f"{name} {rule}", name)


@dataclass(frozen=True, kw_only=True)
class ChatMessage(fields.JsonPart):
    """One turn of a conversation; ``content`` is the text of all its parts."""

    role: ChatRole
    content: Annotated[str, fields.message_text("text")]
    name: str | None = None
    cache_control: fields.Anything = None
    """Accepted and ignored, as ``name``: chat formats do not use it."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls at the end of an answer; ``content`` may then be absent."""
    tool_call_id: str | None = None
    """The call whose result a message of the role ``tool`` has."""

    @classmethod
    def clean(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        empty = values.get("tool_calls") and values.get("content") is None
        return super().clean({**values, "content": ""} if empty else values)

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("must have tool_calls in messages of the assistant only")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("must have tool_call_id if and only if its role is tool")

    @property
    def turn(self) -> Turn:
        calls = tuple(one.call for one in self.tool_calls)
        return Turn(self.role, self.content, calls=calls, call_id=self.tool_call_id or "")


Messages = Annotated[list[ChatMessage], fields.conversation(partial(fields.read, ChatMessage))]


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ConversationRequest, ChoicesRequest):
    """Body of ``POST /v1/chat/completions``."""

    unsupported, ignored = _UNSUPPORTED_IN_CHATS, GenerationRequest.ignored - {"parallel_tool_calls"}
    length_fields = ("max_completion_tokens", "max_tokens")
    messages: Messages
    max_tokens: fields.FromOne | None = None
    max_completion_tokens: fields.FromOne | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice()
        if self.state is None:
            self.turns({})
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs needs logprobs: true", "top_logprobs")

    def turns(self, known: Mapping[str, str] | None) -> Sequence[Turn]:
        return linked([message.turn for message in self.messages], "messages", known)

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


@dataclass(frozen=True, kw_only=True)
class InputMessage(fields.JsonPart):
    """One message of ``input``; an output item of an earlier response also is one."""

    type: Literal["message"] = "message"
    role: Role
    content: Annotated[str, fields.message_text("input_text", "output_text", "text")]
    id: str | None = None
    status: str | None = None

    @property
    def turn(self) -> Turn:
        return Turn(self.role, self.content)


@dataclass(frozen=True, kw_only=True)
class InputCall(fields.JsonPart):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: Arguments
    id: str | None = None
    status: str | None = None

    @property
    def turn(self) -> Turn:
        return Turn("assistant", "", calls=(FunctionCall(self.name, self.arguments, self.call_id),))


@dataclass(frozen=True, kw_only=True)
class InputResult(fields.JsonPart):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str, fields.message_text("input_text", "text")]
    id: str | None = None
    status: str | None = None

    @property
    def turn(self) -> Turn:
        return Turn("tool", self.output, call_id=self.call_id)


InputItem = InputMessage | InputCall | InputResult
_ITEMS: Mapping[str, type[InputItem]] = {
    "message": InputMessage, "function_call": InputCall, "function_call_output": InputResult
}  # fmt: skip


def _item(value: Any, name: str) -> InputItem:
    kind = str(value.get("type") or "message") if isinstance(value, dict) else "message"
    if kind not in _ITEMS:
        raise FieldError(f"{name} must be an item of type {' or '.join(_ITEMS)}; other types are not supported", name)
    return fields.read(_ITEMS[kind], value, name)


@dataclass(frozen=True, kw_only=True)
class TextOptions(fields.JsonPart):
    """``text`` of a request."""

    format: Annotated[TextFormat, fields.part(TextFormat)] | None = None
    verbosity: Literal["medium"] | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseRequest(ConversationRequest):
    """Body of ``POST /v1/responses``: a chat with one choice, whose state is kept."""

    unsupported, ignored = _UNSUPPORTED_IN_RESPONSES, _IGNORED_IN_RESPONSES
    length_fields, format_field = ("max_output_tokens",), "text.format"
    input: Annotated[list[InputItem], fields.conversation(_item, str | list[InputItem])]
    """Messages, calls and their results; a text is a message of the user."""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: fields.FromOne | None = None
    text: Annotated[TextOptions, fields.part(TextOptions)] | None = None
    metadata: fields.Metadata = field(default_factory=dict)

    @classmethod
    def clean(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        kept = super().clean(values)
        if isinstance(kept.get("input"), str):
            kept["input"] = [{"role": "user", "content": kept["input"]}]
        return kept

    def __post_init__(self) -> None:
        if self.previous_response_id is not None and self.state is not None:
            raise ValueError("a request must continue previous_response_id or state; got both. Leave out one of them")
        self.check_choice()

    def turns(self, known: Mapping[str, str] | None) -> Sequence[Turn]:
        """Return the instructions and the input; calls that follow an answer are a part of it."""
        found = [] if self.instructions is None else [Turn("system", self.instructions)]
        for turn in linked([item.turn for item in self.input], "input", known):
            if turn.calls and found and found[-1].role == "assistant":
                turn = found[-1]._replace(calls=found.pop().calls + turn.calls)
            found.append(turn)
        return found

    @property
    def format(self) -> TextFormat | None:
        return None if self.text is None else self.text.format


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest(fields.JsonPart):
    """Body of ``POST /tokenize``: a text, or a conversation as for ``/v1/chat/completions``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = field(default_factory=list)
    tools: Functions = field(default_factory=list)
    add_special_tokens: bool | None = None
    """Whether the document start comes before a text; true unless given."""
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("there must be a prompt or messages, not both")
        if self.messages and self.add_special_tokens:
            raise ValueError("add_special_tokens is for a prompt: the chat format writes those of messages")
        if not self.add_generation_prompt:
            name = "add_generation_prompt"
            raise FieldError(f"{name} must be true: the last message is answered", name)


@dataclass(frozen=True, kw_only=True)
class DetokenizeRequest(fields.JsonPart):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: fields.Ids
