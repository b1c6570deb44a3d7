"""OpenAPI document of the server, written from its routes and from the records that parse requests."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from starlette.routing import Route

from gecko.records import Parsed, Range, docstrings, field_types
from gecko.serving.fields import Json, is_required

_SCALARS: dict[Any, dict[str, Any]] = {
    Any: {}, NoneType: {"type": "null"}, str: {"type": "string"}, bool: {"type": "boolean"},
    int: {"type": "integer"}, float: {"type": "number"}, list: {"type": "array"},
}  # fmt: skip
_BOUNDS = {"least": "minimum", "most": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}


def describe(routes: Sequence[Route], bodies: Mapping[str, type], version: str) -> dict[str, Any]:
    """Return the document for ``routes``; ``bodies`` has the record of the body by path."""
    schemas = Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(route, method)
            if method == "POST":
                schema = schemas.of(bodies[route.path])
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    info, components = {"title": "Gecko", "version": version}, {"schemas": schemas.found}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(route: Route, method: str) -> dict[str, Any]:
    name = re.sub(r"\W", "_", f"{route.name}{route.path_format}")
    answer = {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
    ]
    return {
        "summary": route.name.replace("_", " ").title(), "operationId": f"{name}_{method.lower()}",
        "parameters": parameters, "responses": {"200": answer},
    }  # fmt: skip


class Schemas:
    """JSON schemas of annotations; those of records are collected in ``found`` by name."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def of(self, hint: Any) -> dict[str, Any]:
        """Return the schema of the JSON values that a field with the annotation ``hint`` takes."""
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._annotated(hint)
        if origin in (Union, UnionType):
            return {"anyOf": list(map(self.of, inner))}
        if origin is Literal:
            values = {"const": inner[0]} if len(inner) == 1 else {"enum": list(inner)}
            return {**_SCALARS[type(inner[0])], **values}
        if origin is list:
            return {"type": "array", "items": self.of(inner[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(inner[1]) or True}
        return self._record(hint) if is_dataclass(hint) else dict(_SCALARS[hint])

    def _annotated(self, hint: Any) -> dict[str, Any]:
        (extra,) = hint.__metadata__
        if isinstance(extra, Parsed):
            accepts, keywords = (extra.accepts, extra.keywords) if isinstance(extra, Json) else (None, {})
            return {**self.of(accepts or hint.__origin__), **keywords}
        assert isinstance(extra, Range)
        default = Range("")
        bounds = {name: getattr(extra, name) for name in _BOUNDS if getattr(extra, name) != getattr(default, name)}
        return {**self.of(hint.__origin__), **{_BOUNDS[name]: bound for name, bound in bounds.items()}}

    def _record(self, kind: Any) -> dict[str, Any]:
        name = kind.__name__
        if name not in self.found:
            texts = docstrings(kind)
            self.found[name] = {
                "type": "object", "title": name, "description": inspect.getdoc(kind), "additionalProperties": False,
                "properties": {
                    field.name: self._property(field, field_types(kind)[field.name], texts) for field in fields(kind)
                },
                "required": [field.name for field in fields(kind) if is_required(field)],
            }  # fmt: skip
        return {"$ref": f"#/components/schemas/{name}"}

    def _property(self, field: Field[Any], hint: Any, texts: Mapping[str, str]) -> dict[str, Any]:
        schema = {**self.of(hint), "title": field.name.replace("_", " ").title()}
        if field.name in texts:
            schema["description"] = texts[field.name]
        if not is_required(field):
            schema["default"] = field.default if field.default_factory is MISSING else field.default_factory()
        return schema
