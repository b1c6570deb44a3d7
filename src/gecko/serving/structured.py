"""Fields of a request that constrain the generated text.

They are OpenAI's ``response_format`` and ``text.format``, and ``structured_outputs`` of vLLM 0.12 and later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from gecko.inference.grammar import Grammar
from gecko.serving.fields import JsonObject, Schema, SchemaOrText, Texts, part

_ANY_OBJECT = {"type": "object"}


class GrammarField(NamedTuple):
    """Grammar that a request asks for, and the field of the request that contains it."""

    name: str
    grammar: Grammar


@dataclass(frozen=True, kw_only=True)
class JsonSchema(JsonObject):
    """Schema with a name. Text always fits the schema, as with ``strict: true``."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseFormat(JsonObject):
    """``response_format`` of ``/v1/chat/completions``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema, part(JsonSchema)] | None = None
    schema: Schema | None = None
    """Schema of a ``json_object``, as in llama.cpp."""

    def __post_init__(self) -> None:
        if self.schema is not None and self.type != "json_object":
            raise ValueError("must have json_schema: {schema: …} unless type is json_object")
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("must have json_schema if and only if type is json_schema")

    def grammar(self) -> GrammarField | None:
        """Return the grammar that the text must match; None: any text."""
        if self.json_schema is not None:
            schema = Grammar.json_schema(self.json_schema.schema)
            return GrammarField("response_format.json_schema.schema", schema)
        if self.type == "json_object":
            return GrammarField("response_format", Grammar.json_schema(self.schema or _ANY_OBJECT))
        return None


@dataclass(frozen=True, kw_only=True)
class TextFormat(JsonObject):
    """``text.format`` of ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if (self.schema is not None) != (self.type == "json_schema"):
            raise ValueError("must have a schema if and only if type is json_schema")

    def grammar(self) -> GrammarField | None:
        """Return the grammar that the text must match; None: any text."""
        if self.schema is not None:
            return GrammarField("text.format.schema", Grammar.json_schema(self.schema))
        if self.type == "json_object":
            return GrammarField("text.format", Grammar.json_schema(_ANY_OBJECT))
        return None


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs(JsonObject):
    """``structured_outputs`` of vLLM: exactly one of its fields."""

    json: SchemaOrText | None = None
    """JSON schema, or the text of one."""
    regex: str | None = None
    choice: Texts | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if sum(given not in (None, False) for given in (self.json, self.regex, self.choice, self.json_object)) != 1:
            raise ValueError("must have exactly one of json, regex, choice and json_object")
        if self.choice is not None and "" in self.choice:
            raise ValueError("must have texts of at least one character in choice")

    def grammar(self) -> GrammarField:
        """Return the grammar that the text must match."""
        if self.regex is not None:
            return GrammarField("structured_outputs.regex", Grammar("regex", self.regex))
        if self.choice is not None:
            return GrammarField("structured_outputs.choice", Grammar.choice(self.choice))
        schema = _ANY_OBJECT if self.json is None else self.json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return GrammarField("structured_outputs.json", Grammar("json_schema", text))
