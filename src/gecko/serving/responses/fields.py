"""Body of ``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from gecko.serving.protocol import ChatRequest, JsonPart, Message, Sampled, Unsupported
from gecko.serving.structured import GrammarField, TextFormat

_IGNORED = frozenset(
    {
        "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "truncation",
        "parallel_tool_calls", "max_tool_calls", "stream_options",
    }
)  # fmt: skip
_UNSUPPORTED: Unsupported = {
    "tools": (([],), "the server does not call tools"),
    "tool_choice": (("auto", "none"), "the server does not call tools"),
    "background": ((False,), "the server answers while the client waits"),
    "conversation": ((), "continue a response with previous_response_id"),
    "prompt": ((), "give the text in input"),
    "reasoning": (({}, {"effort": None}, {"effort": "none"}), "the model does not reason apart from its text"),
    "include": (([],), "the output is text only"),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
}
_PARTS = ("input_text", "output_text", "text")
_MAX_METADATA = 16


def _content(value: Any) -> str:
    parts = value if isinstance(value, list) else [{"type": "input_text", "text": value}]
    if not all(isinstance(part, dict) and part.get("type") in _PARTS for part in parts):
        raise ValueError("must be a text, or a list of parts of type input_text or output_text")
    if not all(isinstance(part.get("text"), str) for part in parts):
        raise ValueError("must be a text")
    return "".join(part["text"] for part in parts)


class InputMessage(JsonPart):
    """One message of ``input``; an output item of an earlier response also is one."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str, PlainValidator(_content), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})
    ]
    id: str | None = None
    status: str | None = None


class TextOptions(JsonPart):
    """``text`` of a request."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


def _as_messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[
    list[InputMessage],
    FailFast(),
    Field(min_length=1),
    BeforeValidator(_as_messages, json_schema_input_type=str | list[InputMessage]),
]
"""Messages; a text is a message of the user."""


class ResponseRequest(Sampled):
    """Fields of OpenAI's API besides those of all requests."""

    unsupported, ignored = _UNSUPPORTED, _IGNORED
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    metadata: dict[str, str] = Field({}, max_length=_MAX_METADATA)

    @model_validator(mode="after")
    def _check_together(self) -> ResponseRequest:
        if self.previous_response_id is not None and self.state is not None:
            raise ValueError("a request must continue previous_response_id or state; got both. Leave out one of them")
        return self

    @property
    def messages(self) -> list[Message]:
        """The instructions and the input as turns of a conversation."""
        turns = [Message(role=one.role, content=one.content) for one in self.input]
        return turns if self.instructions is None else [Message(role="system", content=self.instructions), *turns]


class ResponseTurn(ChatRequest):
    """A request as a turn of a chat, from which the requests to the engine are built."""

    asked: Any
    """The ``ResponseRequest``."""

    @classmethod
    def of(cls, asked: ResponseRequest) -> ResponseTurn:
        shared = {name: getattr(asked, name) for name in Sampled.model_fields}
        return cls.model_construct(
            messages=asked.messages, max_completion_tokens=asked.max_output_tokens, asked=asked, **shared
        )

    @property
    def constrained(self) -> bool:
        return self.asked.text is not None or self.structured_outputs is not None

    def grammar(self) -> GrammarField | None:
        text = self.asked.text
        formatted = None if text is None or text.format is None else text.format.grammar()
        if formatted is None:
            return super().grammar()
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs must be given alone; got text.format too. Leave out one of them")
        return formatted
