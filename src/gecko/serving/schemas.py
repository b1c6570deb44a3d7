"""What clients may send: OpenAI's fields, and those that Gecko adds. Wrong types are refused, never guessed at."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from gecko.generation import Sampling

MAX_CHOICES = 128
"""Most continuations of one HTTP request, over all its prompts."""
MAX_LIKELIEST = 20
"""Most alternatives with log-probabilities a token."""
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 1000
_IGNORED = frozenset({"user", "metadata", "store", "service_tier"})
_NOT_OFFERED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "a Gecko reads forwards and cannot fill in before a text"),
    "best_of": ((None, 1), "ask for n continuations with logprobs and choose"),
    "presence_penalty": ((None, 0), "use repetition_penalty"),
    "frequency_penalty": ((None, 0), "use repetition_penalty"),
    "response_format": ((None, {"type": "text"}), "only text is made"),
    "tools": ((None, []), "tools are not called"),
    "functions": ((None, []), "functions are not called"),
}
"""Fields of OpenAI's that would change the answer: their harmless values, and what to do instead."""
_NOTHING: tuple[Any, ...] = (None, False, [])

Ids = list[int]


def _prompt(value: Any) -> str | list[str] | Ids | list[Ids]:
    """Checked by hand: a library's message about a union of four types helps nobody."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        for fits in (_is_text, _is_id, _is_ids):
            if all(map(fits, value)):
                return value
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of lists of token ids")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_id(value: Any) -> bool:
    return type(value) is int


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


def _content(value: Any) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ValueError("must be a text, or a list of parts of the type text; no others are read")
    if not all(_is_text(part.get("text")) for part in parts):
        raise ValueError("must be a text")
    return "".join(part["text"] for part in parts)


def _stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(map(_is_text, stops)) or len(stops) > _MAX_STOPS:
        raise ValueError(f"must be a text or a list of at most {_MAX_STOPS} texts")
    if not all(0 < len(stop) <= _MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"every stop string must have 1 to {_MAX_STOP_LENGTH} characters")
    return stops


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict) or not all(key.isdecimal() and _is_bias(number) for key, number in bias.items()):
        raise ValueError("must map token ids, written as texts, to numbers from -100 to 100")
    return {int(key): float(number) for key, number in bias.items()}


def _is_bias(value: Any) -> bool:
    return type(value) in (int, float) and -100 <= value <= 100


_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
Prompt = Annotated[
    str | list[str] | Ids | list[Ids],
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]}),
]
Stop = Annotated[
    list[str], PlainValidator(_stop), WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]})
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Content = Annotated[str, PlainValidator(_content), WithJsonSchema({"anyOf": [_TEXT, {"type": "array"}]})]


class _Object(BaseModel):
    """An object of JSON. ``null`` is as good as nothing for a field that may be left out: some clients write all."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}


class _Part(_Object):
    """An object inside of a request. Unknown fields pass where they hold nothing: clients send back what an earlier
    answer held, ``"tool_calls": null`` and the like.
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields or value not in _NOTHING}


class StreamOptions(_Part):
    include_usage: bool = False


class Generation(_Object):
    """What both kinds of request share."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = {}
    seed: int | None = None
    state: str | None = None
    """Name of a saved reading state that the prompt goes on from."""

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, data: Any) -> Any:
        """Takes out what makes no difference; refuses what would, with a reason, and names near an unknown one."""
        if not isinstance(data, dict):
            return data
        for name, (harmless, instead) in _NOT_OFFERED.items():
            if name in data and data[name] not in harmless:
                raise ValueError(f"{name} is not offered: {instead}")
        kept = {name: value for name, value in data.items() if name not in _IGNORED and name not in _NOT_OFFERED}
        for name in kept.keys() - cls.model_fields.keys():
            if near := difflib.get_close_matches(name[:40], cls.model_fields, n=1):
                raise ValueError(f"there is no field {name[:40]!r}; did you mean {near[0]!r}?")
        return kept

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """ValueError for numbers out of range."""
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if (value := getattr(self, name)) is not None
        }
        return Sampling(**given, logit_bias=self.logit_bias)


class CompletionRequest(Generation):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs are given for new tokens only: leave out echo or logprobs")
        return self

    @property
    def likeliest(self) -> int | None:
        """How many alternatives to give log-probabilities of; None: no log-probabilities at all."""
        return self.logprobs


class Message(_Part):
    """What one side says; the text of all its parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    """Taken and not told: chat formats have no place for it."""


class ChatRequest(Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def likeliest(self) -> int | None:
        """As for completions."""
        return (self.top_logprobs or 0) if self.logprobs else None
