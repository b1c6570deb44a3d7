"""Constraints on generated text: JSON, a regular expression or a choice of texts, by the llguidance library.

A constraint says after each token which tokens may come next. All others get the logit −inf before sampling.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gecko.data import Tokenizer
from gecko.data.text_stream import letter
from gecko.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from gecko.inference.json_schema import JsonTokens, Names, exact_pattern, exact_schema
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
"""Form of the JSON. They replace the options of the same names that a schema may have in ``x-guidance``.

A small model may write white space for ever, so there are at most 20 characters of it between two symbols.
"""
_OPERATORS = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_LONGEST = 300
"""Characters of a message of llguidance that an error quotes."""


_NO_TEXT = "no token of the vocabulary continues the text towards one that the constraint allows"


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


class Constraint:
    """Compiled grammar for one tokenizer; ``start`` returns the matcher of one sequence. Thread-safe.

    Args:
        matcher: the matcher of llguidance, before any token.
        text: (V,) bool, the ids that represent text.
        tokens: the ids as parts of JSON, of which no object repeats a name; None for other texts.
    """

    def __init__(self, matcher: Any, text: np.ndarray, tokens: JsonTokens | None) -> None:
        self._matcher, self._text, self._tokens = matcher, text, tokens

    @property
    def vocab_size(self) -> int:
        return len(self._text)

    def start(self, stop_tokens: Iterable[int], excluded: frozenset[int] = frozenset()) -> Matcher:
        """Return a matcher at the start of a text.

        Args:
            stop_tokens: ids that may end the text once it is complete.
            excluded: ids that are never drawn.
        """
        text = self._text.copy()
        text[list(excluded)] = False
        return Matcher(self._matcher.deep_copy(), text, self._tokens, frozenset(stop_tokens) - excluded)


class Matcher:
    """Constraint of one sequence at its current position. Raise ConstraintError if no token is allowed."""

    def __init__(
        self, matcher: Any, text: np.ndarray, tokens: JsonTokens | None, stop_tokens: Iterable[int]
    ) -> None:  # fmt: skip
        self._matcher, self._text, self._tokens, self._stops = matcher, text, tokens, list(stop_tokens)
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
        self._continues = bool(allowed.any())
        complete = bool(self._matcher.is_accepting())
        if not complete and not self._continues:
            raise ConstraintError(_NO_TEXT)
        allowed[self._stops] = complete
        return torch.from_numpy(allowed)


class GrammarCompiler:
    """Compiler of constraints for one tokenizer.

    Thread-safe. ``vocab_size`` is the number of logits of the model, at least the tokenizer's ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._known: Any = None
        special = sorted(tokenizer.special_ids)
        self._text = np.zeros(vocab_size, dtype=bool)
        self._text[: tokenizer.vocab_size] = True
        self._text[special] = False

    def compile(self, grammar: Grammar) -> Constraint:
        """Compile a grammar, in at most about a second; releases the GIL.

        Equal grammars are compiled anew: sequences of one constraint share a cache, which has a limit.

        Raises:
            ConstraintError: the grammar is invalid, too large or too complex, or allows no text.
            ImportError: llguidance is not installed.
        """
        library = require("llguidance", "serve")
        try:
            source = _source(library, grammar)
        except ConstraintError:
            raise
        except ValueError as error:  # not JSON, or not Unicode
            raise ConstraintError(str(error)[:_LONGEST]) from error
        limits = library.LLParserLimits(**_LIMITS)
        tokenizer, tokens = self._library_tokenizer(library)
        matcher = library.LLMatcher(tokenizer, source, limits=limits, log_level=0)
        _check(matcher)
        constraint = Constraint(matcher, self._text, tokens if grammar.kind in ("json_schema", "call") else None)
        constraint.start([])  # the first mask fails if the grammar allows no text
        return constraint

    def _library_tokenizer(self, library: Any) -> tuple[Any, JsonTokens]:
        """Return the tokenizer of llguidance, which takes about a second to build for large vocabularies."""
        with self._lock:
            if self._known is None:
                tokenizer = _convert(library, self._tokenizer)
                parts = [tokenizer.decode_bytes([index]) for index in range(self._tokenizer.vocab_size)]
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


def _convert(library: Any, tokenizer: Tokenizer) -> Any:
    """Return the tokenizer of llguidance with the same ids."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        try:
            return library.LLTokenizer(
                tokenizer.definition, n_vocab=tokenizer.vocab_size, eos_token=tokenizer.document_end
            )
        except ValueError:
            pass  # llguidance does not know the decoder of this tokenizer
    return library.LLTokenizer(library.TokenizerWrapper(_Vocabulary(tokenizer)))


class _Vocabulary:
    """Tokenizer in the form that ``TokenizerWrapper`` of llguidance takes."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.document_end
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = _token_bytes(tokenizer)
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
            begin = begin + 1 if end is None else end
        return ids


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of every id inside a longer text; none for ids that are part of a character."""
    if isinstance(tokenizer, ByteTokenizer | SentencePieceTokenizer):
        return tokenizer.token_bytes()
    before = letter(tokenizer)
    start = len(tokenizer.decode(before))
    texts = (tokenizer.decode([*before, index])[start:] for index in range(tokenizer.vocab_size))
    return [b"" if "\ufffd" in text else text.encode() for text in texts]
