"""Fields of a request that constrain the generated text.

They are OpenAI's ``response_format`` and ``text.format``, and ``structured_outputs`` of vLLM 0.12 and later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gecko.inference.grammar import Grammar

_ANY_OBJECT = {"type": "object"}
_MAX_CHOICES = 10_000


@dataclass(frozen=True)
class GrammarField:
    """Grammar that a request asks for, and the field of the request that contains it."""

    name: str
    grammar: Grammar


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class JsonSchema(_Fields):
    """Schema with a name. Text always fits the schema, as with ``strict: true``."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Fields):
    """``response_format`` of ``/v1/chat/completions``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """Schema of a ``json_object``, as in llama.cpp."""

    @model_validator(mode="after")
    def _check_together(self) -> ResponseFormat:
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("must have json_schema: {schema: …} unless type is json_object")
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("must have json_schema if and only if type is json_schema")
        return self

    def grammar(self) -> GrammarField | None:
        if self.json_schema is not None:
            schema = Grammar.json_schema(self.json_schema.schema_)
            return GrammarField("response_format.json_schema.schema", schema)
        if self.type == "json_object":
            return GrammarField("response_format", Grammar.json_schema(self.schema_ or _ANY_OBJECT))
        return None


class TextFormat(_Fields):
    """``text.format`` of ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> TextFormat:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError("must have a schema if and only if type is json_schema")
        return self

    def grammar(self) -> GrammarField | None:
        if self.schema_ is not None:
            return GrammarField("text.format.schema", Grammar.json_schema(self.schema_))
        if self.type == "json_object":
            return GrammarField("text.format", Grammar.json_schema(_ANY_OBJECT))
        return None


class StructuredOutputs(_Fields):
    """``structured_outputs`` of vLLM: exactly one of its fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    """JSON schema, or the text of one."""
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=_MAX_CHOICES)
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> StructuredOutputs:
        if sum(given not in (None, False) for given in (self.json_, self.regex, self.choice, self.json_object)) != 1:
            raise ValueError("must have exactly one of json, regex, choice and json_object")
        if self.choice is not None and "" in self.choice:
            raise ValueError("choice must have texts of at least one character")
        return self

    def grammar(self) -> GrammarField:
        if self.regex is not None:
            return GrammarField("structured_outputs.regex", Grammar("regex", self.regex))
        if self.choice is not None:
            return GrammarField("structured_outputs.choice", Grammar.choice(self.choice))
        schema = _ANY_OBJECT if self.json_ is None else self.json_
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return GrammarField("structured_outputs.json", Grammar("json_schema", text))
