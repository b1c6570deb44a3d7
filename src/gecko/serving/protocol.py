"""Requests of OpenAI's API, with the fields that Gecko adds. Values of the wrong type are refused."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

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
_SEEDS = 1 << 64
_SIMILAR = 0.85
"""Similarity from which a field's name is suggested for an unknown one."""
_CHOICES = {"tools": "tool_choice", "functions": "function_call"}
"""Fields that have no effect if the other one is "none"."""
Unsupported = dict[str, tuple[tuple[Any, ...], str]]
"""Unsupported fields of other servers that would change the answer: values without effect, and the reason or remedy."""
_NO_TOOLS, _NO_FUNCTIONS = "the server does not call tools", "the server does not call functions"
_IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "parallel_tool_calls", "cache_control",
    }
)  # fmt: skip
"""Fields that clients send and that do not change the answer of this server."""
_UNSUPPORTED: Unsupported = {
    "suffix": (("",), "a Gecko generates left to right and cannot insert text before a suffix"),
    "best_of": ((1,), "request n choices with logprobs and select one"),
    "guided_json": ((), "use structured_outputs: {json: …}"),
    "guided_regex": ((), "use structured_outputs: {regex: …}"),
    "guided_choice": ((), "use structured_outputs: {choice: …}"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_FUNCTIONS),
    "function_call": (("none", "auto"), _NO_FUNCTIONS),
    "modalities": ((["text"],), "the server generates text only"),
    "reasoning_effort": (("none",), "the model does not reason apart from its text"),
    "verbosity": (("medium",), "ask for short or long texts in the prompt"),
    "return_token_ids": ((False,), "/tokenize returns the ids of a text"),
    "return_tokens_as_token_ids": ((False,), "/tokenize returns the ids of a text"),
    "prompt_logprobs": ((), "use echo with logprobs on /v1/completions"),
    "add_special_tokens": ((True, False), "a prompt of ids is read as it is"),
    "add_generation_prompt": ((True,), "the last message is answered"),
    "continue_final_message": ((False,), "continue a text with /v1/completions"),
    "skip_special_tokens": ((True,), "special tokens have no text"),
    "spaces_between_special_tokens": ((True, False), "special tokens have no text"),
    "include_stop_str_in_output": ((False,), "a text ends before its stop string"),
    "chat_template_kwargs": (({},), "the chat template takes no options"),
    "use_beam_search": ((False,), "request n choices with logprobs and select one"),
    "length_penalty": ((1,), "there is no beam search"),
    "bad_words": (([],), "exclude tokens with logit_bias: -100"),
    "allowed_token_ids": ((), "use structured_outputs or logit_bias"),
    "priority": ((0,), "requests are served by their length and arrival"),
}
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
    if not isinstance(bias, dict) or not all(_ID.fullmatch(key) and _is_bias(number) for key, number in bias.items()):
        raise ValueError("must map token ids, written as texts, to numbers from -100 to 100")
    if len(bias) > _MAX_BIASES:
        raise ValueError(f"must be of at most {_MAX_BIASES:,} token ids; got {len(bias):,}")
    return {int(key): float(number) for key, number in bias.items()}


def _is_bias(value: Any) -> bool:
    return type(value) in (int, float) and -100 <= value <= 100


_ID = re.compile("0|[1-9][0-9]{0,18}")
"""An id as a text; other spellings of one id would replace each other."""
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


class Sampled(JsonObject):
    """Fields of all requests for text."""

    unsupported: ClassVar[Unsupported] = _UNSUPPORTED
    ignored: ClassVar[frozenset[str]] = _IGNORED
    model: str | None = None
    stream: bool = False
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
    logit_bias: LogitBias = Field({})
    seed: int | None = Field(None, ge=0, lt=_SEEDS)
    state: str | None = None
    """Name of the saved state that the prompt continues."""
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, data: Any) -> Any:
        """Drop unsupported fields without effect; refuse others with a reason, unknown ones with a suggestion."""
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"a request must have at most {_MAX_FIELDS} fields; got {len(data):,}")
        unused = {name for name, choice in _CHOICES.items() if data.get(choice) == "none"}
        for name, (harmless, instead) in cls.unsupported.items():
            if name not in unused and (value := data.get(name)) is not None and value not in harmless:
                raise ValueError(f"{name} is not supported: {instead}")
        kept = {name: value for name, value in data.items() if name not in (*cls.ignored, *cls.unsupported)}
        unknown = _first_unknown(kept, cls.model_fields)
        if unknown is not None and (near := difflib.get_close_matches(unknown[:40], cls.model_fields, 1, _SIMILAR)):
            raise ValueError(f"there is no field {unknown[:40]!r}; did you mean {near[0]!r}?")
        return kept

    def sampling(self) -> Sampling:
        """Return the sampling parameters; ValueError if a number is out of range."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if given.get("top_k") in (0, -1):
            del given["top_k"]  # no limit, as in vLLM
        if given.get("top_p") == 0:
            given["top_p"] = sys.float_info.min  # the most likely token
        return Sampling(**given, logit_bias=self.logit_bias)


class Generation(Sampled):
    """Fields of completions and chats."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check_seeds(self) -> Generation:
        if self.seed is not None and self.seed + self.n > _SEEDS:
            raise ValueError(f"seed + n must be at most 2^64, as choice i has seed + i; got {self.seed} + {self.n}")
        return self

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
    cache_control: Any = None
    """Accepted and ignored, as ``name``: chat formats do not use it."""

    @model_validator(mode="before")
    @classmethod
    def _name_tools(cls, data: Any) -> Any:
        # A message with tool calls may lack content; the error is to name what is not supported.
        if isinstance(data, dict) and data.get("tool_calls"):
            return {**data, "content": ""}
        return data


class ChatRequest(Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
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
