"""Constraints on generated text: JSON, a regular expression or a choice of texts, by the llguidance library. A
constraint says after each token which may come next. Schemas and patterns are made exact first: other programs read the
JSON as its schema says, also where the library rounds, ignores or cannot count."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gecko.data import Tokenizer
from gecko.data.text_stream import letter
from gecko.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from gecko.runtime.process import require

MAX_SCHEMA = 1 << 18
"""Maximum number of characters of a JSON schema, and of all choices together."""
MAX_REGEX = 1 << 14
"""Maximum number of characters of a regular expression."""
_LIMITS = {
    "max_grammar_size": 50_000, "initial_lexer_fuel": 250_000, "max_lexer_states": 5_000,
    "step_lexer_fuel": 100_000, "step_max_items": 20_000, "verbose_errors": False,
}  # fmt: skip
"""Limits of llguidance: about half a second and 40 MB to compile a constraint, and 15 ms per token."""
_JSON = {
    "whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{1,20}", "lenient": False, "coerce_one_of": False,
    "item_separator": ",", "key_separator": ":",
}  # fmt: skip
"""Form of the JSON. They replace the options of the same names that a schema may have in ``x-guidance``. A small model
may write white space for ever, so there are at most 20 characters of it between two symbols."""
_OPERATORS = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_LONGEST = 300
_NO_TEXT = "no token of the vocabulary continues the text towards one that the constraint allows"
_BARRED = f"{_NO_TEXT}: those that would are stop tokens, or excluded by logit_bias"


class ConstraintError(ValueError):
    """A constraint cannot be compiled, allows no further token, or is too complex for its limits."""


@dataclass(frozen=True)
class Grammar:
    """Texts that a constraint allows."""

    kind: Literal["json_schema", "regex", "choice", "call"]
    source: str
    """JSON schema, regular expression, or list of texts as JSON; of calls, the field of the arguments and their schemas
    by the names of functions, as JSON."""

    @staticmethod
    def json_schema(schema: dict[str, Any]) -> Grammar:
        return Grammar("json_schema", json.dumps(schema))

    @staticmethod
    def choice(texts: Sequence[str]) -> Grammar:
        return Grammar("choice", json.dumps(list(texts)))

    @staticmethod
    def call(arguments: str, schemas: Mapping[str, dict[str, Any]]) -> Grammar:
        """Return the grammar of a JSON object with the name of a function and, as the field ``arguments``, an object
        that fits its schema."""
        return Grammar("call", json.dumps([arguments, schemas]))


@dataclass(frozen=True, eq=False)
class Constraint:
    """Compiled grammar for one tokenizer; thread-safe."""

    matcher: Any
    """That of llguidance, before any token."""
    text: np.ndarray
    """(V,) bool: the ids that represent text."""
    tokens: JsonTokens | None
    """The ids as parts of JSON, of which no object repeats a name; None for other texts."""

    @property
    def vocab_size(self) -> int:
        return len(self.text)


class Matcher:
    """Constraint of one sequence at its current position. ``stop_tokens`` are no part of the text, and may end it
    once it is complete; ``excluded`` ids are never drawn. Raise ConstraintError if the text cannot become complete."""

    def __init__(
        self, constraint: Constraint, stop_tokens: Iterable[int], excluded: frozenset[int] = frozenset()
    ) -> None:
        self._matcher, self._tokens = constraint.matcher.deep_copy(), constraint.tokens
        stops = frozenset(stop_tokens).intersection(range(constraint.vocab_size))
        self._text, self._stops, self._barred = constraint.text, list(stops - excluded), list(stops | excluded)
        self._names = Names()
        self.allowed = self._next()
        """(V,) bool, the tokens that may come next."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and no token can follow."""
        return not self._continues

    def advance(self, token: int) -> None:
        """Append an allowed token to the text. Raise ConstraintError if no token can follow although the text is not
        complete, or a limit is reached."""
        self._matcher.consume_token(token)
        if self._tokens is not None:
            self._names = self._names.read(self._tokens.parts[token]) or Names()
        self.allowed = self._next()

    def _next(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _check(self._matcher)
        known = np.unpackbits(bits, bitorder="little")[: len(self._text)].astype(bool)
        allowed = self._text.copy()
        allowed[: len(known)] &= known
        allowed[len(known) :] = False
        if self._tokens is not None:
            allowed[self._tokens.refused(self._names, allowed)] = False
        barred = bool(allowed[self._barred].any())
        allowed[self._barred] = False
        self._continues = bool(allowed.any())
        complete = bool(self._matcher.is_accepting())
        if not complete and not self._continues:
            raise ConstraintError(_BARRED if barred else _NO_TEXT)
        allowed[self._stops] = complete
        return torch.from_numpy(allowed)


class GrammarCompiler:
    """Compiler of constraints for one tokenizer; thread-safe. ``vocab_size`` is the number of logits of the model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._known: Any = None
        special = sorted(tokenizer.special_ids)
        self._text = np.zeros(vocab_size, dtype=bool)
        self._text[: tokenizer.vocab_size] = True
        self._text[special] = False

    def compile(self, grammar: Grammar) -> Constraint:
        """Compile a grammar, in at most about a second, without the GIL; equal ones anew, as sequences of one share a
        cache, which has a limit. Raise ConstraintError if the grammar is invalid, too large or too complex, or allows
        no text, ImportError if llguidance is not installed."""
        library = require("llguidance", "serve")
        try:
            source = _source(library, grammar)
        except ValueError as error:  # too long, not JSON, or not Unicode
            raise ConstraintError(str(error)[:_LONGEST]) from error
        limits = library.LLParserLimits(**_LIMITS)
        tokenizer, tokens = self._library_tokenizer(library)
        matcher = library.LLMatcher(tokenizer, source, limits=limits, log_level=0)
        _check(matcher)
        constraint = Constraint(matcher, self._text, tokens if grammar.kind in ("json_schema", "call") else None)
        Matcher(constraint, [])  # the first mask fails if the grammar allows no text
        return constraint

    def _library_tokenizer(self, library: Any) -> tuple[Any, JsonTokens]:
        """Return the tokenizer of llguidance, which takes about a second to build for large vocabularies."""
        with self._lock:
            if self._known is None:
                given, tokenizer = self._tokenizer, None
                if isinstance(given, HuggingFaceTokenizer):
                    with suppress(ValueError):  # llguidance does not know the decoder of this tokenizer
                        ends = {"n_vocab": given.vocab_size, "eos_token": given.document_end}
                        tokenizer = library.LLTokenizer(given.definition, **ends)
                if tokenizer is None:
                    tokenizer = library.LLTokenizer(library.TokenizerWrapper(_Vocabulary(given)))
                parts = [tokenizer.decode_bytes([index]) for index in range(given.vocab_size)]
                self._known = tokenizer, JsonTokens(parts)
            return self._known


def _source(library: Any, grammar: Grammar) -> str:
    """Return the grammar in the form of llguidance."""
    limit = MAX_REGEX if grammar.kind == "regex" else MAX_SCHEMA
    if len(grammar.source) > limit:
        raise ConstraintError(f"must have at most {limit:,} characters; got {len(grammar.source):,}")
    if grammar.kind == "json_schema":
        return library.LLMatcher.grammar_from_json_schema(exact_schema(grammar.source), overrides=_JSON)
    if grammar.kind == "call":
        arguments, schemas = json.loads(grammar.source)
        rules = [f"start: {' | '.join(f'call_{index}' for index in range(len(schemas)))}"]
        for index, (name, schema) in enumerate(schemas.items()):
            # Each schema has a rule of its own, so that references inside of it find what they name.
            exact = json.loads(exact_schema(json.dumps(schema))) | {"x-guidance": _JSON}
            opening = json.dumps(f"{{{json.dumps('name')}: {json.dumps(name)}, {json.dumps(arguments)}: ")
            rules += [
                f'call_{index}: {opening} arguments_{index} "}}"',
                f"arguments_{index}: %json {json.dumps(exact)}",
            ]
        return library.LLMatcher.grammar_from_lark("\n".join(rules))
    if grammar.kind == "regex":
        # \d and \w are ASCII, as in the patterns of a schema.
        return library.LLMatcher.grammar_from_regex(library.regex_to_lark(exact_pattern(grammar.source), "dw"))
    texts = (_OPERATORS.sub(r"\\\g<0>", text) for text in json.loads(grammar.source))
    return library.LLMatcher.grammar_from_regex("|".join(texts))


def _check(matcher: Any) -> None:
    if matcher.is_error():
        message = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        raise ConstraintError(_NO_TEXT if message.startswith("NoExtension") else message[:_LONGEST])


class _Vocabulary:
    """Tokenizer in the form that ``TokenizerWrapper`` of llguidance takes."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.document_end
        self.special_token_ids = sorted(tokenizer.special_ids)
        # The bytes of every id inside a longer text; none for ids that are part of a character.
        if isinstance(tokenizer, ByteTokenizer | SentencePieceTokenizer):
            self.tokens = tokenizer.token_bytes()
        else:
            before = letter(tokenizer)
            start = len(tokenizer.decode(before))
            texts = (tokenizer.decode([*before, index])[start:] for index in range(tokenizer.vocab_size))
            self.tokens = [b"" if "\ufffd" in text else text.encode() for text in texts]
        self._ids = {content: index for index, content in enumerate(self.tokens) if content}
        self._longest = max(map(len, self._ids))
        for index in self.special_token_ids:
            self.tokens[index] = f"<special {index}>".encode()

    def __call__(self, text: bytes) -> list[int]:
        """Return the longest tokens from left to right: ``encode`` may add a space before the first word."""
        ids, begin = [], 0
        while begin < len(text):
            ends = range(min(len(text), begin + self._longest), begin, -1)
            end = next((end for end in ends if text[begin:end] in self._ids), None)
            if end is not None:
                ids.append(self._ids[text[begin:end]])
            begin = end or begin + 1
        return ids


_WHOLE, _DIGITS = 1 << 53, 15
"""Largest integer, and digits of other numbers, that the library holds without an error."""
_MULTIPLE = 1000
"""Largest ``multipleOf``; the library needs as many states."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""
_KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "allOf": ("a list of schemas", (list,)), "format": ("a text", (str,)), "pattern": ("a text", (str,)),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), ("a number", (int, float))),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("a number", (int, float, bool))),  # bool: of draft 4
}  # fmt: skip
"""Types of the keywords that ``_exact_keywords`` reads."""
_FORMATS = {
    "date": "^(?:[1-9]|0[1-9]|00[1-9]|000[1-9])[0-9]*-(?:0[13-9]|1|02-(?:[01]|2[0-8]))",
    "time": ":[0-9]{2}:[0-5]",
}
"""Patterns that exclude days and seconds which only some years and programs have: 29 February and second 60."""
_PARTS = re.compile(r"\\[pP]\{?.|\\.|\[(?P<negated>\^?)(?P<inside>(?:\\.|[^\]\\])*)\]", re.DOTALL)
"""Escapes and sets of a regular expression."""
_CONTROLS = re.compile(r"\0|\\(?:x00|u0000|U00000000|[xuU]\{0*\}|[pP]\{?[^{LMN])")


def exact_schema(source: str) -> str:
    """Return a schema for the library whose texts fit the schema ``source``, as programs with float64 read both. Raise
    ValueError if the source is not JSON, or has what the library does not hold exactly."""
    try:
        return json.dumps(_exact(json.loads(source)))
    except RecursionError:
        raise ValueError("a schema must not be nested so deep") from None


def exact_pattern(pattern: str) -> str:
    """Return a regular expression for the library whose texts match ``pattern`` in other programs too. To sets of all
    control characters the library adds quote and backslash: NUL is left out of them. Raise ValueError if other programs
    read a set otherwise, or the pattern asks for NUL."""

    def exact(part: re.Match[str]) -> str:
        inside = part["inside"]
        if inside == "" or (inside and re.search(r"\[|&&|--|~~", re.sub(r"\\.", "", inside, flags=re.DOTALL))):
            raise ValueError(
                f"[…] in a pattern must not be empty or have '[', '&&', '--' or '~~'; got {part[0][:100]!r}"
            )
        if part["negated"]:
            return f"[^\\x00{inside}]"
        if _CONTROLS.search(part[0]):
            raise ValueError(f"a pattern must not have NUL or classes of control characters; got {part[0][:100]!r}")
        return part[0]

    return _PARTS.sub(exact, pattern)


def _read(value: float) -> float:
    """Return a number as the library holds it."""
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _exact(value: Any, keyword: str = "") -> Any:
    """Return the value of a keyword with its schemas in their exact form."""
    if isinstance(value, list):
        return [_exact(one, keyword) for one in value]
    if isinstance(value, int | float) and not (abs(value) <= _WHOLE and _read(value) == value):
        rule = f"numbers must be integers in -2^53..2^53, or have at most {_DIGITS} digits, as others are rounded"
        raise ValueError(f"{rule}; got {str(value)[:40]}")
    if not isinstance(value, dict):
        return value
    if keyword not in (*_NAMED, "const", "enum"):
        return _exact_keywords({name: _exact(one, name) for name, one in value.items()})
    if wrong := next(filter(re.compile(r"[\0-\x1f\x7f]").search, value), None):
        raise ValueError(f"names of properties must not have control characters; got {wrong[:40]!r}")
    rename = exact_pattern if keyword == "patternProperties" else str
    return {rename(name): _exact(one, "" if keyword in _NAMED else keyword) for name, one in value.items()}


def _exact_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    for name, (rule, kinds) in _KINDS.items():
        if name in schema and type(schema[name]) not in kinds:
            raise ValueError(f"{name} must be {rule}; got {json.dumps(schema[name])[:40]}")
    multiple, pattern = schema.get("multipleOf", 1), schema.get("pattern")
    if not (0 < multiple <= _MULTIPLE and multiple == int(multiple)):
        raise ValueError(f"multipleOf must be an integer in 1..{_MULTIPLE}; got {multiple}")
    if pattern is not None:
        schema["pattern"] = exact_pattern(pattern)
    for bound, choose, sign in (("Minimum", max, 1), ("Maximum", min, -1)):
        excluded: Any = schema.get(f"exclusive{bound}")
        if type(excluded) in (int, float):
            # The text of a number may have more digits than float64, and be read as the bound itself.
            inside = _read(excluded + sign * max(abs(excluded) * 1e-14, 1e-15))
            schema[bound.lower()] = choose(inside, schema.get(bound.lower(), inside))
            del schema[f"exclusive{bound}"]
    if isinstance(form := schema.get("format"), str):
        patterns = [{"pattern": pattern} for name, pattern in _FORMATS.items() if name in form.split("-")]
        schema["allOf"] = [*schema.get("allOf", ()), *patterns]
    if not isinstance(schema.get("items"), list):
        schema.pop("additionalItems", None)  # it has no effect, but the library would ignore prefixItems
    schema.pop("$schema", None)  # of older drafts, the library ignores const and others
    return schema


class Names(NamedTuple):
    """Names of the objects that are open at a place in a text of JSON."""

    open: tuple[frozenset[bytes] | None, ...] = ()
    """Names of each open object; None for a list."""
    string: bytes | None = None
    """The part of the open string that was read, if the string is a name."""
    is_name: bool = False
    """Whether the string that is open, or the next one, is a name."""
    escaped: bool = False

    def read(self, part: bytes) -> Names | None:
        """Return the names after the next part of the text; None if it repeats a name, or spells one with ``\\u``:
        by another spelling, the name of a property passes as that of an additional one.
        """
        opened, string, is_name, escaped = self
        for symbol in (part[at : at + 1] for at in range(len(part))):
            if is_name and escaped and symbol == b"u":
                return None
            if string is not None and (symbol != b'"' or escaped):
                string += symbol if is_name else b""
                escaped = symbol == b"\\" and not escaped
            elif string is not None:
                if is_name and string in (known := opened[-1] or frozenset()):
                    return None
                opened = (*opened[:-1], known | {string}) if is_name else opened
                string, is_name = None, False
            elif symbol == b'"':
                string = b""
            elif symbol in b"{[":
                opened, is_name = (*opened, frozenset() if symbol == b"{" else None), symbol == b"{"
            elif symbol in b"}]":
                opened, is_name = opened[:-1], False
            elif symbol == b",":
                is_name = opened[-1] is not None
        return Names(opened, string, is_name, escaped)


class JsonTokens:
    """Tokens as parts of a text of JSON. ``parts`` has the bytes of every id."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.parts = parts
        names = [b'"' in part or b"\\u" in part for part in parts]
        escapes = [found or part.startswith(b"u") for found, part in zip(names, parts, strict=True)]
        self._ending = [np.flatnonzero(found) for found in ([part.count(b'"') > 1 for part in parts], names, escapes)]
        """Ids that ``Names.read`` may refuse: outside of a name, in one, and after a backslash in one."""

    def refused(self, names: Names, allowed: np.ndarray) -> list[int]:
        """Return the tokens that must not come next; ``allowed``: (V,) bool, those that may by the grammar."""
        ending = self._ending[0 if not names.is_name or names.string is None else 1 + names.escaped]
        return [index for index in ending[allowed[ending]].tolist() if names.read(self.parts[index]) is None]
