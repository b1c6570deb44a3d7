"""A text that is complete by the grammar of a schema fits the schema for a parser that knows nothing of the grammar."""

import json
import re
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import load_tokenizer
from gecko.inference.grammar import ConstraintError, Grammar, GrammarCompiler, JsonTokens, Matcher, Names

COMPILER = GrammarCompiler(load_tokenizer("bytes"), 264)
END = 256
KINDS = {
    "object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool,
    "null": type(None),
}  # fmt: skip


def write(grammar: Grammar, seed: int, length: int = 200) -> str | None:
    """Return a text of random bytes that the grammar allows; None if it does not end. Symbols of JSON are likely."""
    random, matcher, text = np.random.default_rng(seed), Matcher(COMPILER.compile(grammar), [END]), bytearray()
    weights = np.where(np.arange(264) < 128, 1.0, 0.02)
    for symbols, weight in ((b'"}]', 15.0), (b"\\u0619.", 6.0)):
        weights[list(symbols)] = weight
    weights[END] = 1e9
    while not matcher.finished and len(text) < length:
        likely = weights * matcher.allowed.numpy()
        token = int(random.choice(264, p=likely / likely.sum()))
        if token == END:
            break
        text.append(token)
        matcher.advance(token)
    else:
        return text.decode() if matcher.finished else None
    return text.decode()


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"a name is repeated: {pairs}"
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, in which true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or (
        type(one) in (int, float) and type(other) in (int, float) and one == other
    )


def fits(value: Any, schema: Any) -> bool:
    """Whether a value fits a schema of the keywords of ``schemas``."""
    if isinstance(schema, bool):
        return schema
    kind, number = schema.get("type"), type(value) in (int, float)
    if kind is not None and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    found = [any(same(value, one) for one in schema.get("enum", [value]))]
    found += [any(fits(value, one) for one in schema.get("anyOf", [True]))]
    if number:
        found += [value >= schema.get("minimum", value), value <= schema.get("maximum", value)]
        found += [value > schema["exclusiveMinimum"]] if "exclusiveMinimum" in schema else []
        found += [value < schema["exclusiveMaximum"]] if "exclusiveMaximum" in schema else []
        found += [value % schema.get("multipleOf", 1) == 0] if "multipleOf" in schema else []
    if isinstance(value, str):
        found += [schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 20)]
        found += [re.search(schema.get("pattern", ""), value) is not None]
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        parts = [*first, *[schema.get("items", True)] * (len(value) - len(first))]
        found += [fits(one, part) for one, part in zip(value, parts, strict=False)]
        found += [len(value) <= schema.get("maxItems", 1 << 20)]
    if isinstance(value, dict):
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        found += [set(schema.get("required", ())) <= value.keys()]
        found += [schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", 1 << 20)]
        for name, one in value.items():
            parts = [known[name]] if name in known else []
            parts += [part for pattern, part in patterns.items() if re.search(pattern, name)]
            found += [fits(one, part) for part in parts or [schema.get("additionalProperties", True)]]
    return all(found)


NAMES = st.sampled_from(["a", "aa", "b", 'q"', "b\\", "é", "", "\u2028", "minimum", "const", "pattern"])
NUMBERS = st.integers(-20, 20) | st.sampled_from([0.5, -2.25, 0.1, 99.5, 2.0, -0.0, 1 << 53, -(1 << 53)])
PATTERNS = st.sampled_from(
    ["^a", "b$", r"^\d+$", r"^\w{2}$", '^[^"]{1,3}$', r"^[^\\a]*$", "^.{2}$", "^(a|b)*$", "^é+$", r"^[^\s\d]{2}$", "x"]
)
DATA = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text('ab"\\\n/é\u2028\x01\x7f😀', max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)


def record(kind: str, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=optional)


SIMPLE = (
    st.sampled_from(["integer", "number"]).flatmap(
        lambda kind: record(
            kind, minimum=NUMBERS, maximum=NUMBERS, exclusiveMinimum=NUMBERS, exclusiveMaximum=NUMBERS,
            multipleOf=st.sampled_from([1, 2, 3, 7, 10]),
        )
    )
    | record("string", minLength=st.integers(0, 3), maxLength=st.integers(2, 5), pattern=PATTERNS)
    | st.fixed_dictionaries({"enum": st.lists(DATA, min_size=1, max_size=3)})
    | st.just({"type": "boolean"})
)  # fmt: skip
SCHEMAS = st.recursive(
    SIMPLE,
    lambda inner: record(
        "object", properties=st.dictionaries(NAMES, inner, max_size=3), required=st.lists(NAMES, max_size=2),
        additionalProperties=st.booleans() | inner, patternProperties=st.dictionaries(PATTERNS, inner, max_size=1),
        minProperties=st.integers(0, 3), maxProperties=st.integers(1, 4),
    )
    | record(
        "array", items=inner, prefixItems=st.lists(inner, min_size=1, max_size=2), maxItems=st.integers(1, 3),
        additionalItems=st.just(False),
    )
    | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=100)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 20))
def test_a_complete_text_fits_its_schema(schema: dict[str, Any], seed: int) -> None:
    grammar = Grammar.json_schema(schema)
    try:
        text = write(grammar, seed)
    except ConstraintError:
        return  # refused, as schemas that no text fits
    assert text is None or fits(json.loads(text, object_pairs_hook=once), schema), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "boolean"}},
        {"type": "object", "properties": {"u": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
        {"type": "object", "patternProperties": {"^[01]*$": {"type": "boolean"}}, "additionalProperties": False},
        {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False, "maxItems": 2},
        {"type": "string", "pattern": '^[^"]{3}$'},
        {"type": "string", "pattern": r"^[^\\\n]{3}$"},
        {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 0},
        {"type": "number", "exclusiveMinimum": 99.5, "exclusiveMaximum": 100.25},
        {"$schema": "http://json-schema.org/draft-04/schema#", "enum": [3], "const": 3},
    ],
    ids=str,
)
def test_texts_of_schemas_that_the_library_reads_otherwise(schema: dict[str, Any]) -> None:
    texts = [text for seed in range(30) if (text := write(Grammar.json_schema(schema), seed)) is not None]
    assert len(texts) > 10
    for text in texts:
        assert fits(json.loads(text, object_pairs_hook=once), schema), text


@pytest.mark.parametrize("begin", ['{"\\u0061":', '{"b":1,"b":', '{"b":{"c":1},"b":'])
def test_a_name_has_one_spelling_and_one_place(begin: str) -> None:
    """However the model goes on, no parser finds another schema's value or fewer properties than were counted."""
    schema = {"properties": {"a": {"type": "integer"}}, "type": "object"}
    matcher = Matcher(COMPILER.compile(Grammar.json_schema(schema)), [])
    for byte in begin.encode():
        if not matcher.allowed[byte]:
            return
        matcher.advance(byte)
    raise AssertionError(begin)


@pytest.mark.parametrize(("bounds", "text"), [
    ({"exclusiveMaximum": 1}, "0." + "9" * 30), ({"exclusiveMinimum": -1}, "-0." + "9" * 30),
    ({"exclusiveMinimum": 0.5}, "0.5" + "0" * 30 + "1"),
    ({"exclusiveMinimum": 0, "maximum": 1}, "0." + "0" * 400 + "1"),
])  # fmt: skip
def test_no_number_is_read_as_the_bound_that_it_must_not_reach(bounds: dict[str, float], text: str) -> None:
    matcher = Matcher(COMPILER.compile(Grammar.json_schema({"type": "number", **bounds})), [END])
    for byte in text.encode():
        if not matcher.allowed[byte]:
            return
        matcher.advance(byte)
    assert not matcher.allowed[END]


def test_names_are_told_apart_with_tokens_of_several_symbols() -> None:
    parts = [b"a", b'"', b'a":', b'"a', b'":1,"', b"\\u0061", b"u0061", b"\\", b'{"":2,"":3', b'"b":[{"a":1}]']
    tokens, every = JsonTokens(parts), np.ones(len(parts), dtype=bool)

    def refused(before: bytes) -> set[bytes]:
        names = Names().read(before)
        assert names is not None
        return {parts[index] for index in tokens.refused(names, every)}

    assert refused(b'{"a":1,"') == {b'a":', b"\\u0061"}
    assert refused(b'{"a":1,"a') == {b'"', b'":1,"', b"\\u0061", b'"b":[{"a":1}]', b'"a'}
    assert refused(b'{"b":{"a":1},') == {b'{"":2,"":3', b'"b":[{"a":1}]'}
    assert refused(b'{"a":1,"\\') == {b"u0061"}
    assert refused(b'{"a":"a') == refused(b'["a","a') == set()
    assert refused(b"") == {b'{"":2,"":3'}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        *[({"enum": [number]}, "2^53") for number in ((1 << 53) + 1, 1 << 64, 1e300, 0.1 + 0.2, 1.7976931348623157)],
        ({"const": {"a": [-(1 << 53) - 1]}}, "2^53"),
        ({"type": "integer", "minimum": (1 << 53) + 1}, "2^53"),
        ({"type": "integer", "exclusiveMaximum": 1 << 60}, "2^53"),
        ({"properties": {"const": {"maximum": 1e17}}}, "2^53"),
        ({"const": float("inf")}, "2^53"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "integer", "multipleOf": 65537}, "multipleOf"),
        ({"properties": {"\x01": {}}}, "control characters"),
        ({"pattern": "[a-z&&[^b]]"}, "&&"),
        ({"pattern": "[[:alpha:]]"}, "[…]"),
        ({"patternProperties": {"[a--b]": {}}}, "--"),
        ({"pattern": "[\\x00-!]"}, "NUL"),
        *[({name: {}}, name) for name in ("not", "if", "propertyNames", "contains", "dependentSchemas")],
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ],
    ids=str,
)
def test_what_the_grammar_does_not_hold_is_refused(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(told)):
        COMPILER.compile(Grammar.json_schema(schema))


@settings(max_examples=100)
@given(data=st.data(), others=st.sampled_from([{}, {"format": "date"}, {"exclusiveMinimum": 1, "exclusiveMaximum": 2}]))
def test_a_keyword_of_the_wrong_type_is_refused_by_its_name(data: st.DataObject, others: dict[str, Any]) -> None:
    """Whatever else the schema says, and wherever it stands."""
    wrong = {
        "allOf": [None, {}, "a", 5, True], "format": [None, {}, 5, ["a"], True], "pattern": [None, {}, 5, ["a"], True],
        **{name: [None, {}, "5", [5], True] for name in ("minimum", "maximum", "multipleOf")},
        **{name: [None, {}, "5", [5]] for name in ("exclusiveMinimum", "exclusiveMaximum")},
    }  # fmt: skip
    keyword = data.draw(st.sampled_from(sorted(wrong)))
    inner = {**others, keyword: data.draw(st.sampled_from(wrong[keyword]))}
    schema = data.draw(st.sampled_from([inner, {"properties": {"a": inner}}, {"allOf": [inner]}, {"items": inner}]))
    with pytest.raises(ConstraintError, match=f"^{keyword} must be a .*; got "):
        COMPILER.compile(Grammar.json_schema(schema))


@pytest.mark.parametrize("form", ["date", "date-time", "time"])
def test_dates_are_those_of_the_calendar(form: str) -> None:
    for day, time in (("2023-02-29", "00:00:00Z"), ("0000-01-01", "00:00:00Z"), ("2023-04-05", "23:59:60Z")):
        text = {"date": day, "time": time, "date-time": f"{day}T{time}"}[form]
        try:
            datetime.fromisoformat(text if form != "time" else f"2000-01-01T{time}")
        except ValueError:
            expectation: AbstractContextManager[Any] = pytest.raises(ConstraintError)
        else:
            expectation = nullcontext()
        with expectation:
            COMPILER.compile(Grammar.json_schema({"format": form, "const": text}))


@pytest.mark.parametrize("pattern", [r"\w{3}", r"\d\w", '[^"]{2}', r"[\w-]{2}x?", r"\s\d"])
def test_a_regular_expression_means_what_it_means_elsewhere(pattern: str) -> None:
    for seed in range(20):
        text = write(Grammar("regex", pattern), seed)
        assert text is not None and re.fullmatch(pattern, text), text
