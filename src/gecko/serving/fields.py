"""Records of the JSON objects in requests, the types of their fields, and the OpenAPI document that is written of them.

Values of the wrong type are refused.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from starlette.routing import Route

from gecko.inference.sampling import MAX_PENALTY
from gecko.records import FieldError, Parsed, Range, build, convert, docstrings, field_types
from gecko.serving.bodies import NO_OBJECT, read_json
from gecko.serving.limits import ApiError, invalid

_LONGEST_NAME = 100
_MAX_STOPS, _MAX_STOP_LENGTH, _MAX_STOP_IDS = 16, 1000, 128
_MAX_BIASES, _MAX_METADATA, _MAX_TEXTS = 1024, 16, 10_000
_ID = re.compile("0|[1-9][0-9]{0,18}")
"""An id as a text; other spellings of one id would replace each other."""
Ids = list[int]


@dataclass(frozen=True, kw_only=True)
class JsonObject:
    """JSON object. ``null`` in an optional or unknown field counts as absent, because some clients send all fields."""

    lenient: ClassVar[bool] = False

    @classmethod
    def clean(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of an object that are not absent; ValueError if a field is not supported."""
        required = {known.name: is_required(known) for known in fields(cls)}

        def absent(name: str, value: Any) -> bool:
            empty = value is None or (cls.lenient and name not in required and (value is False or value == []))
            return empty and not required.get(name)

        return {name: value for name, value in values.items() if not absent(name, value)}


@dataclass(frozen=True, kw_only=True)
class JsonPart(JsonObject):
    """JSON object inside a request, which may have unknown fields that are null, false or [].

    They are ignored, because clients send back fields of earlier answers, such as ``"tool_calls": null``.
    """

    lenient = True


K = TypeVar("K", bound=JsonObject)


def parse_body(kind: type[K], body: bytes | bytearray) -> K:
    """Parse and validate a body. Raise ApiError 400 for an invalid body."""
    try:
        data = read_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body must be JSON; {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, NO_OBJECT, code="invalid_json")
    try:
        return read(kind, data)
    except ValueError as error:
        param = error.field if isinstance(error, FieldError) else None
        raise invalid(param, str(error).removesuffix(".")) from error


def read(kind: type[K], value: Any, name: str = "") -> K:
    """Build a record from a JSON object, which is the field ``name`` of a request, or the request itself.

    Raise ApiError 400 for the first unknown field, FieldError for a value of the wrong type or out of range and for a
    missing field, ValueError if fields of a request do not fit each other.
    """
    if not isinstance(value, dict):
        raise _wrong(name, "must be an object")
    prefix = f"{name}." if name else ""
    try:
        values = kind.clean(value)
        known = {each.name for each in fields(kind)}
        if (unknown := next((found for found in values if found not in known), None)) is not None:
            param = (prefix + unknown)[:_LONGEST_NAME]
            raise ApiError(400, f"{param}: unknown field", code="unknown_field", param=param)
        return build(kind, values, prefix)
    except ValueError as error:
        if isinstance(error, FieldError) or not name:
            raise
        raise _wrong(name, str(error)) from None


def is_required(known: Field[Any]) -> bool:
    """Return whether a field of a record has no default."""
    return known.default is MISSING and known.default_factory is MISSING


def _wrong(name: str, rule: str) -> FieldError:
    return FieldError(f"{name} {rule}", name)


@dataclass(frozen=True, eq=False)
class Json(Parsed):
    """Metadata of a field that ``by`` converts from JSON."""

    accepts: Any = None
    """Annotation of the values that it takes; None: that of the field."""
    keywords: Mapping[str, Any] = field(default_factory=dict)


def part(kind: type[JsonObject]) -> Json:
    """Return the metadata of a field with a record."""
    return Json(lambda value, name, texts: read(kind, value, name))


def conversation(read_one: Callable[[Any, str], Any], accepts: Any = None) -> Json:
    """Return the metadata of a field with a list of messages, at least one, each read by its value and name."""

    def by(value: Any, name: str, texts: bool) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise _wrong(name, "must be a list of at least one message")
        return [read_one(each, f"{name}.{index}") for index, each in enumerate(value)]

    return Json(by, accepts, {} if accepts else {"minItems": 1})


def message_text(*kinds: str) -> Json:
    """Return the metadata of the content of a message: a text, or a list of parts of these types."""

    def by(value: Any, name: str, texts: bool) -> str:
        parts = value if isinstance(value, list) else [{"type": kinds[0], "text": value}]
        if not all(isinstance(part, dict) and part.get("type") in kinds for part in parts):
            rule = f"must be a text, or a list of parts of type {' or '.join(kinds)}"
            raise _wrong(name, f"{rule}; other types are not supported")
        if not all(isinstance(part.get("text"), str) for part in parts):
            raise _wrong(name, "must be a text")
        return "".join(part["text"] for part in parts)

    return Json(by, str | list)


def few(kind: type, most: int, least: int = 0) -> Json:
    """Return the metadata of a list of ``least`` to ``most`` values."""

    def by(value: Any, name: str, texts: bool) -> Any:
        found = convert(value, list[kind], name)  # type: ignore[valid-type]
        if not least <= len(found) <= most:
            raise _wrong(name, f"must be a list of {least} to {most:,} values; got {len(found):,}")
        return found

    return Json(by, keywords={**({"minItems": least} if least else {}), "maxItems": most})


def _prompt(value: Any, name: str, texts: bool) -> list[str] | list[Ids]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are(str, value) or all(_are(int, each) for each in value):
            return value
        if _are(int, value):
            return [value]
    raise _wrong(name, "must be a text, a list of texts, a list of token ids, or a list of lists of token ids")


def _are(kind: type, values: Any) -> bool:
    # Each value is tested in Python: one call in C for a long list would hold the GIL until it returns.
    return isinstance(values, list) and all(type(each) is kind for each in values)


def _stop(value: Any, name: str, texts: bool) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not _are(str, stops) or len(stops) > _MAX_STOPS:
        raise _wrong(name, f"must be a text or a list of at most {_MAX_STOPS} texts")
    if not all(0 < len(stop) <= _MAX_STOP_LENGTH for stop in stops):
        raise _wrong(name, f"must have 1 to {_MAX_STOP_LENGTH} characters in every stop string")
    return stops


def _logit_bias(bias: Any, name: str, texts: bool) -> dict[int, float]:
    def fits(key: str, number: Any) -> bool:
        return bool(_ID.fullmatch(key)) and type(number) in (int, float) and -100 <= number <= 100

    if not isinstance(bias, dict) or not all(fits(*item) for item in bias.items()):
        raise _wrong(name, "must map token ids, written as texts, to numbers from -100 to 100")
    if len(bias) > _MAX_BIASES:
        raise _wrong(name, f"must be of at most {_MAX_BIASES:,} token ids; got {len(bias):,}")
    return {int(key): float(number) for key, number in bias.items()}


def _metadata(value: Any, name: str, texts: bool) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > _MAX_METADATA:
        raise _wrong(name, f"must be an object of at most {_MAX_METADATA} texts")
    return {key: convert(text, str, f"{name}.{key}") for key, text in value.items()}


def _schema(value: Any, name: str, texts: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(name, "must be an object")
    return value


def between(least: int, most: int) -> Range:
    """Return the metadata of a number that must lie in a range."""
    return Range(f"must be in {least:,}..{most:,}", least=least, most=most)


Anything = Annotated[Any, Json(lambda value, name, texts: value)]
Prompt = Annotated[list[str] | list[Ids], Json(_prompt, str | list[str] | Ids | list[Ids])]
Stop = Annotated[list[str], Json(_stop, str | list[str])]
StopIds = Annotated[Ids, few(int, _MAX_STOP_IDS)]
LogitBias = Annotated[dict[int, float], Json(_logit_bias, dict[str, float])]
Metadata = Annotated[dict[str, str], Json(_metadata, keywords={"maxProperties": _MAX_METADATA})]
Schema = Annotated[dict[str, Any], Json(_schema)]
SchemaOrText = Annotated[
    dict[str, Any] | str, Json(lambda value, *named: value if isinstance(value, str) else _schema(value, *named))
]
Texts = Annotated[list[str], few(str, _MAX_TEXTS, least=1)]
Penalty = Annotated[float, between(-int(MAX_PENALTY), int(MAX_PENALTY))]
FromZero = Annotated[int, Range("must be at least 0", least=0)]
FromOne = Annotated[int, Range("must be at least 1", least=1)]

_SCALARS: dict[Any, dict[str, Any]] = {
    Any: {}, NoneType: {"type": "null"}, str: {"type": "string"}, bool: {"type": "boolean"},
    int: {"type": "integer"}, float: {"type": "number"}, list: {"type": "array"},
}  # fmt: skip
_BOUNDS = {"least": "minimum", "most": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}


def describe(routes: Sequence[Route], bodies: Mapping[str, type], version: str) -> dict[str, Any]:
    """Return the document for ``routes``; ``bodies`` has the record of the body by path."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            name = re.sub(r"\W", "_", f"{route.name}{route.path_format}")
            answer = {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
            operation: dict[str, Any] = {
                "summary": route.name.replace("_", " ").title(), "operationId": f"{name}_{method.lower()}",
                "parameters": parameters, "responses": {"200": answer},
            }  # fmt: skip
            if method == "POST":
                schema = schema_of(bodies[route.path], schemas)
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    info = {"title": "Gecko", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def schema_of(hint: Any, records: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the JSON values that a field with the annotation ``hint`` takes; those of records are added
    to ``records`` by name."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        (extra,) = hint.__metadata__
        if isinstance(extra, Json):
            return {**schema_of(extra.accepts or hint.__origin__, records), **extra.keywords}
        bounds = {_BOUNDS[name]: getattr(extra, name, None) for name in _BOUNDS}
        finite = {name: bound for name, bound in bounds.items() if bound is not None and math.isfinite(bound)}
        return {**schema_of(hint.__origin__, records), **finite}
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(kind, records) for kind in inner]}
    if origin is Literal:
        values = {"const": inner[0]} if len(inner) == 1 else {"enum": list(inner)}
        return {**_SCALARS[type(inner[0])], **values}
    if origin is list:
        return {"type": "array", "items": schema_of(inner[0], records)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(inner[1], records) or True}
    return _schema_of_record(hint, records) if is_dataclass(hint) else dict(_SCALARS[hint])


def _schema_of_record(kind: Any, records: dict[str, Any]) -> dict[str, Any]:
    name, properties = kind.__name__, dict[str, Any]()
    if name not in records:
        texts, hints = docstrings(kind), field_types(kind)
        records[name] = {
            "type": "object", "title": name, "description": inspect.getdoc(kind), "additionalProperties": False,
            "properties": properties, "required": [field.name for field in fields(kind) if is_required(field)],
        }  # fmt: skip
        for field in fields(kind):
            schema = {**schema_of(hints[field.name], records), "title": field.name.replace("_", " ").title()}
            if field.name in texts:
                schema["description"] = texts[field.name]
            if not is_required(field):
                schema["default"] = field.default if field.default_factory is MISSING else field.default_factory()
            properties[field.name] = schema
    return {"$ref": f"#/components/schemas/{name}"}
