"""Requests of OpenAI's API, with the fields that Gecko adds. Values of the wrong type are refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from gecko.inference import Sampling

MAX_CHOICES = 128
"""Maximum number of choices of one HTTP request, over all of its prompts."""
MAX_TOP_LOGPROBS = 20
"""Maximum number of alternatives with log-probabilities per token."""
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 1000
_MAX_BIASES = 1024
_MAX_FIELDS = 100
_IGNORED = frozenset({"user", "metadata", "store", "service_tier"})
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "a Gecko generates left to right and cannot insert text before a suffix"),
    "best_of": ((None, 1), "request n choices with logprobs and select one"),
    "presence_penalty": ((None, 0), "use repetition_penalty"),
    "frequency_penalty": ((None, 0), "use repetition_penalty"),
    "response_format": ((None, {"type": "text"}), "the model generates text only"),
    "tools": ((None, []), "the server does not call tools"),
    "functions": ((None, []), "the server does not call functions"),
}
"""Unsupported fields of OpenAI's API that would change the answer: values without effect, and the reason or remedy."""
_EMPTY_VALUES: tuple[Any, ...] = (None, False, [])

Ids = list[int]


def _prompt(value: Any) -> str | list[str] | Ids | list[Ids]:
    """Validate a prompt. This is done by hand: pydantic's message about a union of four types is hard to read."""
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
        raise ValueError("must be a text, or a list of parts of type text; other types are not supported")
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
    if len(bias) > _MAX_BIASES:
        raise ValueError(f"must be of at most {_MAX_BIASES:,} token ids; got {len(bias):,}")
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


def _first_unknown(data: dict[Any, Any], known: Collection[str]) -> str | None:
    return next((name for name in data if name not in known), None)


class _Object(BaseModel):
    """JSON object. ``null`` in an optional field counts as absent, because some clients send all fields.

    Only the first unknown field is validated, and refused.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        validated = {*cls.model_fields, _first_unknown(data, cls.model_fields)}
        return {
            name: value for name, value in data.items()
            if name in validated and (value is not None or name not in optional)
        }  # fmt: skip


class _Part(_Object):
    """JSON object inside a request. Unknown fields with empty values are ignored: clients send back fields of earlier
    answers, such as ``"tool_calls": null``.
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields or value not in _EMPTY_VALUES}


class StreamOptions(_Part):
    include_usage: bool = False


class Generation(_Object):
    """Fields of both kinds of request."""

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
    """Name of the saved state that the prompt continues."""

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, data: Any) -> Any:
        """Drop unsupported fields without effect; refuse others with a reason, unknown ones with a suggestion."""
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"a request must have at most {_MAX_FIELDS} fields; got {len(data):,}")
        for name, (harmless, instead) in _UNSUPPORTED.items():
            if name in data and data[name] not in harmless:
                raise ValueError(f"{name} is not supported: {instead}")
        kept = {name: value for name, value in data.items() if name not in _IGNORED and name not in _UNSUPPORTED}
        unknown = _first_unknown(kept, cls.model_fields)
        if unknown is not None and (near := difflib.get_close_matches(unknown[:40], cls.model_fields, n=1)):
            raise ValueError(f"there is no field {unknown[:40]!r}; did you mean {near[0]!r}?")
        return kept

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """Return the sampling parameters; ValueError if a number is out of range."""
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
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs cover generated tokens only: leave out echo or logprobs")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of alternatives with log-probabilities; None: no log-probabilities."""
        return self.logprobs


class Message(_Part):
    """One turn of a conversation; ``content`` is the text of all its parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    """Accepted and ignored: chat formats do not use it."""


class ChatRequest(Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of alternatives with log-probabilities; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
