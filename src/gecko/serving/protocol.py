"""Requests of OpenAI's API, with the fields that Gecko adds. Those for chats and responses are in ``chat_requests``."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from gecko.data.turns import Function
from gecko.inference import Sampling
from gecko.inference.grammar import Grammar
from gecko.records import FieldError, Range
from gecko.serving import fields

MAX_CHOICES = 128
"""Maximum number of choices of one HTTP request, over all of its prompts."""
MAX_TOP_LOGPROBS = 20
_MAX_FIELDS = 100
_SEEDS = 1 << 64
_SIMILAR = 0.85
"""Similarity from which a field's name is suggested for an unknown one."""
_CHOICES = {"tools": "tool_choice", "functions": "function_call"}
"""Fields that have no effect if the other one is "none"."""
Unsupported = dict[str, tuple[tuple[Any, ...], str]]
"""Unsupported fields of other servers that would change the answer: values without effect, and the reason or remedy."""
_NO_TOOLS, _NO_FUNCTIONS = "use /v1/chat/completions or /v1/responses", "use tools"
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
    "detokenize": ((True,), "the answer is text"),
    "include_reasoning": ((True, False), "the model does not reason apart from its text"),
    "use_beam_search": ((False,), "request n choices with logprobs and select one"),
    "length_penalty": ((1,), "there is no beam search"),
    "bad_words": (([],), "exclude tokens with logit_bias: -100"),
    "allowed_token_ids": ((), "use structured_outputs or logit_bias"),
    "priority": ((0,), "requests are served by their length and arrival"),
}
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
Seed = Annotated[int, Range("must be from 0 to 2^64 - 1", least=0, below=_SEEDS)]
TopLogprobs = Annotated[int, fields.between(0, MAX_TOP_LOGPROBS)]
GrammarField = tuple[str, Grammar]
"""The field of a request that contains a grammar which the text must match, and the grammar."""
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class JsonSchema(fields.JsonObject):
    """Schema with a name. Text always fits the schema, as with ``strict: true``."""

    schema: fields.Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseFormat(fields.JsonObject):
    """``response_format`` of ``/v1/chat/completions``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema, fields.part(JsonSchema)] | None = None
    schema: fields.Schema | None = None
    """Schema of a ``json_object``, as in llama.cpp."""

    def __post_init__(self) -> None:
        if self.schema is not None and self.type != "json_object":
            raise ValueError("must have json_schema: {schema: …} unless type is json_object")
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("must have json_schema if and only if type is json_schema")

    def grammar(self) -> GrammarField | None:
        if self.json_schema is not None:
            return "response_format.json_schema.schema", Grammar.json_schema(self.json_schema.schema)
        wanted = self.type == "json_object"
        return ("response_format", Grammar.json_schema(self.schema or _ANY_OBJECT)) if wanted else None


@dataclass(frozen=True, kw_only=True)
class TextFormat(fields.JsonObject):
    """``text.format`` of ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: fields.Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if (self.schema is not None) != (self.type == "json_schema"):
            raise ValueError("must have a schema if and only if type is json_schema")

    def grammar(self) -> GrammarField | None:
        if self.schema is not None:
            return "text.format.schema", Grammar.json_schema(self.schema)
        return ("text.format", Grammar.json_schema(_ANY_OBJECT)) if self.type == "json_object" else None


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs(fields.JsonObject):
    """``structured_outputs`` of vLLM: exactly one of its fields."""

    json: fields.SchemaOrText | None = None
    """JSON schema, or the text of one."""
    regex: str | None = None
    choice: fields.Texts | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if sum(given not in (None, False) for given in (self.json, self.regex, self.choice, self.json_object)) != 1:
            raise ValueError("must have exactly one of json, regex, choice and json_object")
        if self.choice is not None and "" in self.choice:
            raise ValueError("must have texts of at least one character in choice")

    def grammar(self) -> GrammarField:
        if self.regex is not None:
            return "structured_outputs.regex", Grammar("regex", self.regex)
        if self.choice is not None:
            return "structured_outputs.choice", Grammar.choice(self.choice)
        schema = _ANY_OBJECT if self.json is None else self.json
        text = Grammar("json_schema", schema) if isinstance(schema, str) else Grammar.json_schema(schema)
        return "structured_outputs.json", text


@dataclass(frozen=True, kw_only=True)
class StreamOptions(fields.JsonPart):
    """``stream_options``."""

    include_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(fields.JsonObject):
    """Fields of all requests for text."""

    unsupported: ClassVar[Unsupported] = _UNSUPPORTED
    ignored: ClassVar[frozenset[str]] = _IGNORED
    length_fields: ClassVar[Sequence[str]] = ("max_tokens",)
    """Fields for the largest number of tokens; the first one counts."""
    default_length: ClassVar[int] = sys.maxsize
    format_field: ClassVar[str] = "response_format"
    n = 1
    """Number of choices per prompt."""
    model: str | None = None
    stream: bool = False
    stop: fields.Stop = field(default_factory=list)
    stop_token_ids: fields.StopIds = field(default_factory=list)
    """Ids that end the answer besides the model's own end tokens."""
    ignore_eos: bool = False
    """Whether the model's end tokens do not end the answer."""
    min_tokens: fields.FromZero = 0
    """Number of tokens before which no stop token and no stop string ends the answer."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    logit_bias: fields.LogitBias = field(default_factory=dict)
    seed: Seed | None = None
    state: str | None = None
    """Name of the saved state that the prompt continues."""
    structured_outputs: Annotated[StructuredOutputs, fields.part(StructuredOutputs)] | None = None

    @classmethod
    def clean(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Drop unsupported fields without effect; refuse others with a reason, unknown ones with a suggestion."""
        if len(values) > _MAX_FIELDS:
            raise ValueError(f"a request must have at most {_MAX_FIELDS} fields; got {len(values):,}")
        unused = {name for name, choice in _CHOICES.items() if values.get(choice) == "none"}
        for name, (harmless, instead) in cls.unsupported.items():
            value = values.get(name)
            if isinstance(value, dict):
                value = {key: part for key, part in value.items() if part is not None}
            if name not in unused and value is not None and value not in harmless:
                raise FieldError(f"{name} is not supported: {instead}", name)
        dropped, known = {*cls.ignored, *cls.unsupported}, cls.__dataclass_fields__
        kept = super().clean({name: value for name, value in values.items() if name not in dropped})
        unknown = next((name for name in kept if name not in known), None)
        if unknown is not None and (near := difflib.get_close_matches(unknown[:40], known, 1, _SIMILAR)):
            raise ValueError(f"there is no field {unknown[:40]!r}; did you mean {near[0]!r}?")
        return kept

    @property
    def num_choices(self) -> int:
        """Number of choices over all prompts."""
        return self.n

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of alternatives with log-probabilities; None: no log-probabilities."""
        return None

    @property
    def format(self) -> ResponseFormat | TextFormat | None:
        """The form that the text must have; None: any."""
        return None

    @property
    def functions(self) -> Sequence[Function]:
        """What the answer may call."""
        return ()

    @property
    def enforced(self) -> Sequence[Function]:
        """Functions of which the answer must call one; empty if it may be text."""
        return ()

    @property
    def constrained(self) -> bool:
        """Whether the text may have to match a grammar, which takes long to prepare."""
        return self.format is not None or self.structured_outputs is not None or bool(self.enforced)

    def length(self, most: int) -> tuple[str, int]:
        """Return the field with the largest number of tokens, and its value; not given, it is at most ``most``."""
        given = [(name, found) for name in self.length_fields if (found := getattr(self, name)) is not None]
        return given[0] if given else (self.length_fields[-1], min(self.default_length, most))

    def grammar(self) -> GrammarField | None:
        """Return the grammar that the text must match, and its field; ValueError if there are two."""
        formatted = None if self.format is None else self.format.grammar()
        if self.structured_outputs is None:
            return formatted
        if formatted is not None:
            both = f"structured_outputs must be given alone; got {self.format_field} too"
            raise ValueError(f"{both}. Leave out one of them")
        return self.structured_outputs.grammar()

    def sampling(self) -> Sampling:
        """Return the sampling parameters; ValueError if a number is out of range."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if given.get("top_k") in (0, -1):
            del given["top_k"]  # no limit, as in vLLM
        if given.get("top_p") == 0:
            given["top_p"] = sys.float_info.min  # the most likely token
        return Sampling(**given, logit_bias=self.logit_bias)


@dataclass(frozen=True, kw_only=True)
class ChoicesRequest(GenerationRequest):
    """Fields of completions and chats."""

    n: Annotated[int, fields.between(1, MAX_CHOICES)] = 1
    stream_options: Annotated[StreamOptions, fields.part(StreamOptions)] | None = None
    response_format: Annotated[ResponseFormat, fields.part(ResponseFormat)] | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed + self.n > _SEEDS:
            raise ValueError(f"seed + n must be at most 2^64, as choice i has seed + i; got {self.seed} + {self.n}")

    @property
    def format(self) -> ResponseFormat | None:
        return self.response_format

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(ChoicesRequest):
    """Body of ``POST /v1/completions``."""

    default_length = 16  # as in the API of OpenAI
    prompt: fields.Prompt
    max_tokens: fields.FromZero | None = None
    echo: bool = False
    logprobs: TopLogprobs | None = None

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompt)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


@dataclass(frozen=True, kw_only=True)
class SaveState(fields.JsonObject):
    """Body of ``POST /v1/states``."""

    num_choices, constrained = 1, False

    name: str
    response_id: str
    """Stored response after which the conversation is saved."""
