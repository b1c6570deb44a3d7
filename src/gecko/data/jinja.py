"""Jinja environment of chat templates: the functions and filters that transformers gives them, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from gecko.runtime.process import require


def environment() -> Any:
    """Return the Jinja environment that transformers uses for templates, sandboxed."""
    require("jinja2", "chat")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_blocks()]
    )
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    sandbox.filters["tojson"] = _to_json
    return sandbox


def _generation_blocks() -> Any:
    """Return the extension for ``{% generation %}`` blocks around assistant turns, which are rendered unchanged."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012 (a class attribute for Jinja)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return GenerationBlocks


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
