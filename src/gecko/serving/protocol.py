"""Requests of OpenAI's API, with the fields that Gecko adds. Values of the wrong type are refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from gecko.inference import Sampling
from gecko.inference.sampling import MAX_PENALTY
from gecko.serving.structured import GrammarField, ResponseFormat, StructuredOutputs

MAX_CHOICES = 128
"""Maximum number of choices of one HTTP request, over all of its prompts."""
MAX_TOP_LOGPROBS = 20
"""Maximum number of alternatives with log-probabilities per token."""
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 1000
_MAX_BIASES = 1024
_MAX_FIELDS = 100
_MAX_STOP_IDS = 128
_IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "parallel_tool_calls",
    }
)  # fmt: skip
"""Fields that clients send and that do not change the answer of this server."""
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "a Gecko generates left to right and cannot insert text before a suffix"),
    "best_of": ((None, 1), "request n choices with logprobs and select one"),
    "guided_json": ((None,), "use structured_outputs: {json: …}"),
    "guided_regex": ((None,), "use structured_outputs: {regex: …}"),
    "guided_choice": ((None,), "use structured_outputs: {choice: …}"),
    "tools": ((None, []), "the server does not call tools"),
    "tool_choice": ((None, "none", "auto"), "the server does not call tools"),
    "functions": ((None, []), "the server does not call functions"),
    "function_call": ((None, "none", "auto"), "the server does not call functions"),
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


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
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
StopIds = Annotated[list[int], FailFast(), Field(max_length=_MAX_STOP_IDS)]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Content = Annotated[str, PlainValidator(_content), WithJsonSchema({"anyOf": [_TEXT, {"type": "array"}]})]


def _first_unknown(data: dict[Any, Any], known: Collection[str]) -> str | None:
    """Return the first unknown field with a value other than ``null``."""
    return next((name for name, value in data.items() if name not in known and value is not None), None)


class JsonObject(BaseModel):
    """JSON object. ``null`` in an optional or unknown field counts as absent, because some clients send all fields.

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


class JsonPart(JsonObject):
    """JSON object inside a request. Unknown fields with empty values are ignored: clients send back fields of earlier
    answers, such as ``"tool_calls": null``.
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields or value not in _EMPTY_VALUES}


class StreamOptions(JsonPart):
    include_usage: bool = False


class Generation(JsonObject):
    """Fields of both kinds of request."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop = []
    stop_token_ids: StopIds = []
    """Ids that end the answer besides the model's own end tokens."""
    ignore_eos: bool = False
    """Whether the model's end tokens do not end the answer."""
    min_tokens: int = Field(0, ge=0)
    """Number of tokens before which no stop token and no stop string ends the answer."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: LogitBias = {}
    seed: int | None = None
    state: str | None = None
    """Name of the saved state that the prompt continues."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

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

    @property
    def constrained(self) -> bool:
        """Whether the text may have to match a grammar."""
        return self.response_format is not None or self.structured_outputs is not None

    def grammar(self) -> GrammarField | None:
        """Return the grammar that the text must match; ValueError if there are two."""
        formatted = None if self.response_format is None else self.response_format.grammar()
        if self.structured_outputs is None:
            return formatted
        if formatted is not None:
            raise ValueError("structured_outputs must be given alone; got response_format too. Leave out one of them")
        return self.structured_outputs.grammar()

    def sampling(self) -> Sampling:
        """Return the sampling parameters; ValueError if a number is out of range."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return Sampling(**given, logit_bias=self.logit_bias)


class CompletionRequest(Generation):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of alternatives with log-probabilities; None: no log-probabilities."""
        return self.logprobs


class Message(JsonPart):
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


class TokenizeRequest(JsonPart):
    """Body of ``POST /tokenize``: a text, or a conversation as for ``/v1/chat/completions``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast(), Field(min_length=1)] = []
    add_special_tokens: bool | None = None
    """Whether the document start comes before a text; true unless given."""
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("there must be a prompt or messages, not both")
        if self.messages and self.add_special_tokens:
            raise ValueError("add_special_tokens is for a prompt: the chat format writes those of messages")
        return self


class DetokenizeRequest(JsonPart):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
