"""Jinja environment of chat templates, and their special tokens, which are kept apart from the same characters in text.

The environment is that of transformers, in a sandbox that bounds work and memory, as a template is a program of the
model's author. Each round, call, comparison and text in it is charged to a budget, in proportion to the size of the
values.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from types import GeneratorType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MARK = "\ue000"  # begins what replaces a part of a message while the template is rendered
_ITSELF, _BREAK, _STAND_INS = _MARK + "\ue001", _MARK + "\ue002", 0xF0000
"""Replacement of the mark itself; what divides special tokens; first of the characters that, after a mark, replace
special tokens of one character, which cannot be divided."""
_PART = 1 << 16  # characters of a message that are processed in one call, which holds the GIL until it returns


class SpecialTokens:
    """Finds the special tokens of a rendered template, but not the same characters inside messages.

    ``ids`` has the id of each, by its text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        any_of_them = "|".join(sorted(map(re.escape, ids), key=len, reverse=True)) or r"(?!)"
        self._whole = re.compile(any_of_them)
        # A lookahead finds all starts: special tokens may overlap or contain one another.
        self._first = re.compile(f"(?={any_of_them})")
        self._longest = max(map(len, ids), default=1)
        letters = [ord(text) for text in ids if len(text) == 1]
        self._hidden = {letter: _MARK + chr(_STAND_INS + index) for index, letter in enumerate(letters)}
        self._hidden[ord(_MARK)] = _ITSELF

    def protect(self, text: str) -> str:
        """Mark a message so that ``split`` finds no special token in it; ``split`` removes the marks."""
        borders = [0, *(start + 1 for start in self._starts(text)), len(text)]
        return _BREAK.join(_translate(text[begin:end], self._hidden) for begin, end in pairwise(borders))

    def protect_all(self, value: Any) -> Any:
        """Return a value of JSON with all of its texts marked."""
        if isinstance(value, dict):
            return {self.protect_all(name): self.protect_all(one) for name, one in value.items()}
        if isinstance(value, list):
            return list(map(self.protect_all, value))
        return self.protect(value) if isinstance(value, str) else value

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the ids of special tokens and the texts between them, without marks."""
        begin = at = 0
        while at < len(text):
            found = self._whole.search(text, at, at + _PART + self._longest)
            if found is None or found.start() > at + _PART:
                # A match beyond this part may be cut short; the next part finds it in full.
                at += _PART
                continue
            yield from self._plain(text[begin : found.start()])
            yield self.ids[found[0]]
            begin = at = found.end()
        yield from self._plain(text[begin:])

    def _starts(self, text: str) -> Iterator[int]:
        for begin in range(0, len(text), _PART):
            for found in self._first.finditer(text, begin, begin + _PART + self._longest):
                if found.start() < begin + _PART:
                    yield found.start()

    def _plain(self, text: str) -> list[str]:
        text = text.replace(_BREAK, "")
        for letter, hidden in self._hidden.items():  # the mark itself comes last
            text = text.replace(hidden, chr(letter))
        return [text] if text else []


def _translate(text: str, table: Mapping[int, str]) -> str:
    return "".join(text[begin : begin + _PART].translate(table) for begin in range(0, len(text), _PART))


_WORK, _WORK_OF_MESSAGE, _SIZE = 1 << 18, 1000, 1 << 20
"""Budget of a rendering (about a second), what each message adds to it, and the largest value that may be made."""
_MOST_BITS = 1 << 12
_CHEAP = ("count", "d", "default", "first", "last", "length")  # filters that do not look at the elements
_REFUSED = ("pprint", "random", "striptags", "sum", "urlize", "wordwrap")
"""Filters that are random, or slow in another way than the sizes of values tell."""
_BY_CHARACTER = ("dictsort", "groupby", "map", "reject", "rejectattr", "select", "selectattr", "sort", "unique")
"""Filters that take each character of a text as an element."""
_CHARGED = {nodes.Compare: "expr", nodes.Operand: "expr", nodes.Test: "node", nodes.Pair: "key"}
"""Expressions that take time in proportion to the value in this field."""


class _Work(threading.local):
    """Work that the rendering in this thread may still do."""

    left, most, unit = 0, 0, 1

    def begin(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> None:
        calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
        given = sum(len(message["content"]) for message in messages) + len(json.dumps([calls, tools]))
        parts = len(messages) + len(tools) + sum(map(len, calls))
        self.left, self.most = _WORK + _WORK_OF_MESSAGE * parts, _SIZE + 8 * given
        self.unit = 16 + given // (1 << 12)

    def take(self, size: int) -> None:
        self.left -= 1 + size // self.unit
        if self.left < 0 or size > self.most:
            raise TemplateError("it takes too many rounds, or makes too much text, for these messages")

    def weigh(self, value: Any) -> int:
        """Subtract the size of a value with its contents, in items and characters, from the budget; return the size."""
        total, held = 0, [value]
        while held:
            one = held.pop()
            size = 1 + (len(one) if hasattr(type(one), "__len__") else 0)
            self.take(size)
            total += size
            if isinstance(one, int) and one.bit_length() > _MOST_BITS:
                raise TemplateError(f"its numbers must have at most {_MOST_BITS:,} bits")
            if isinstance(one, Namespace):
                one = object.__getattribute__(one, "_Namespace__attrs")
            if isinstance(one, dict):
                held += (*one, *one.values())
            elif size > 1 and not isinstance(one, str | bytes | range | LoopContext):
                held += one
        return total

    def weigh_product(self, value: Any, given: Iterable[Any]) -> None:
        """Charge a function whose result, or whose time, may be the product of two sizes, or of a size and a number."""
        times = sum(abs(one) if isinstance(one, int) else self.weigh(one) for one in given)
        self.take(self.weigh(value) * (1 + times // 8))

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.weigh(value)
            yield value


_work = _Work()


def render(template: Any, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
    """Render a template of ``environment``; it may raise anything, and raises TemplateError if it does not end soon."""
    _work.begin(messages, names.get("tools", ()))
    rendered: str = template.render(messages=messages, **names)
    return rendered


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and pass the values that take time to the filters that charge them."""

        def charged(node: Any, how: str = "charged") -> nodes.Filter:
            return nodes.Filter(node, how, [], [], None, None, lineno=node.lineno)

        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Output, nodes.Concat, nodes.Getitem, *_CHARGED))):
            if isinstance(node, nodes.For):
                node.iter = charged(node.iter, "each")
            elif isinstance(node, nodes.Output | nodes.Concat):
                node.nodes = [charged(part) for part in node.nodes]
            else:
                sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
                field = _CHARGED.get(type(node), "node" if sliced else "arg")
                setattr(node, field, charged(getattr(node, field)))
        tree.set_environment(self)
        return tree

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        return wrapped and _narrow(value.__self__) and wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and not isinstance(left, int | float):
            _narrow(left)
        if operator == "*" and isinstance(left, Sequence) != isinstance(right, Sequence):
            _work.weigh_product(*((left, [right]) if isinstance(left, Sequence) else (right, [left])))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _work.weigh(1 << min(left.bit_length() * abs(right), 2 * _MOST_BITS))
        _work.weigh((left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in Jinja)
        if isinstance(__obj, Macro):
            _work.take(0)
        else:
            args = tuple(map(_read, args))
            _work.weigh_product(getattr(__obj, "__self__", None), (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


def _read(value: Any) -> Any:
    """Return a list in place of a generator, and anything else as it is."""
    return list(_work.each(value)) if isinstance(value, GeneratorType | reversed) else value


def _narrow(text: Any) -> bool:
    """Return True; TemplateError if a format may write much for one value."""
    if re.search(r"\d{3}|[*]|\{[^{}]*\{", str(text)):
        raise TemplateError("a format must have widths of at most two digits")
    return True


def _charged(name: str) -> Any:
    """Return a filter of Jinja that is charged."""

    @pass_context
    def run(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name not in _CHEAP:
            value = list(value) if name in _BY_CHARACTER and isinstance(value, str) else _read(value)
            _work.weigh_product(value, (*args, *kwargs.values()))
        return _PLAIN.call_filter(name, _narrow(value) and value if name == "format" else value, args, kwargs, context)

    return run


class _GenerationBlocks(Extension):
    """``{% generation %}`` blocks around assistant turns, which are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (a class attribute for Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment(now: datetime | None = None) -> Any:
    """Return the sandbox; templates see the time ``now``, or, if it is None, that of the clock."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        _narrow(pattern)
        return (now or datetime.now()).strftime(pattern)

    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks])
    del sandbox.globals["lipsum"]
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    sandbox.filters = {name: _charged(name) for name in _PLAIN.filters if name not in _REFUSED}
    sandbox.filters["charged"] = pass_context(lambda context, value: _work.weigh(value) and value)
    sandbox.filters["each"] = pass_context(lambda context, values: _work.each(values))
    return sandbox


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Encode as JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_PLAIN = ImmutableSandboxedEnvironment()
_PLAIN.filters["tojson"] = _to_json
