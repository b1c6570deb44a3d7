"""The door for records: what a field takes as JSON, as a text and from Python, and what it says about other values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gecko.records import Count, FieldError, Parsed, Range, _docstrings_in, build, check, docstrings


@dataclass(frozen=True)
class Part:
    name: str
    share: Annotated[float, Range("must lie between 0 and 1", above=0, below=1)] = 0.5

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Order:
    """An example with every kind of field."""

    ids: list[int]
    """Ids of ``things``.
    They may be many."""
    count: Count = 1
    size: Annotated[int, Range("must be a whole number of at least 2", least=2, typed=True)] = 2
    kind: Literal["small", "large"] = "small"
    names: tuple[str, ...] = ()
    pair: tuple[float, float] | None = None
    loud: bool = False
    first: Part = field(default_factory=lambda: Part("a"))
    parts: tuple[Part, ...] = ()
    word: Annotated[str, Parsed(lambda value, name, texts: str(value).upper())] = ""


orders = st.builds(
    Order, st.lists(st.integers()), st.integers(1, 99), st.integers(2, 99), st.sampled_from(["small", "large"]),
    st.tuples(st.text(), st.text()), st.none() | st.tuples(st.floats(-1, 1), st.floats(-1, 1)), st.booleans(),
    parts=st.tuples(st.builds(Part, st.text(), st.floats(0.1, 0.9))),
)  # fmt: skip


@given(orders)
def test_a_record_is_built_from_its_own_values(order: Order) -> None:
    assert build(Order, asdict(order)) == order


def test_texts_are_read_as_the_field_asks() -> None:
    texts = {"ids": [], "count": "1_000", "names": "(a, b=1,)", "pair": "0.5,1", "loud": "yes", "word": "x"}
    order = build(Order, {**texts, "first": {"name": "none", "share": "0.25"}}, texts=True)
    assert (order.count, order.names, order.pair, order.loud) == (1000, ("a", "b=1"), (0.5, 1.0), True)
    assert (order.first, order.word) == (Part("none", 0.25), "X")
    assert build(Order, {"ids": [], "pair": "none", "names": "none"}, texts=True) == Order([])


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({}, "ids", "an order needs the fields ['ids'], which this one lacks; got []."),
        ({"cuont": 1}, "it.cuont", "got 'it.cuont'. Did you mean 'it.count'?"),
        ({"ids": [1, "2"]}, "it.ids.1", "it.ids.1 must be a whole number; got '2'."),
        ({"ids": [True]}, "it.ids.0", "it.ids.0 must be a whole number; got True."),
        ({"ids": 7}, "it.ids", "it.ids must be a list of any number of values; got 7."),
        ({"count": "3"}, "it.count", "it.count must be a whole number; got '3'."),
        ({"count": 3.0}, "it.count", "it.count must be a whole number; got 3.0."),
        ({"count": 0}, "it.count", "it.count must be at least 1; got 0."),
        ({"count": 2**31}, "it.count", "it.count must be at most 2,147,483,647; got 2147483648."),
        ({"size": 1}, "it.size", "it.size must be a whole number of at least 2; got 1."),
        ({"size": None}, "it.size", "it.size must be a whole number of at least 2; got None."),
        ({"kind": "larg"}, "it.kind", "it.kind must be one of large, small; got 'larg'. Did you mean 'large'?"),
        ({"names": ["a", 1]}, "it.names.1", "it.names.1 must be text; got 1."),
        ({"pair": [1]}, "it.pair", "it.pair must be a list of 2 values; got [1]."),
        ({"pair": [1, 10**400]}, "it.pair.1", "it.pair.1 must be a number; got 1000"),
        ({"loud": "false"}, "it.loud", "it.loud must be true or false; got 'false'."),
        ({"first": "b"}, "it.first", "it.first has fields of its own, so set one of them, as it.first.field=value"),
        ({"parts": [{"name": "a"}, {"name": 1}]}, "it.parts.1.name", "it.parts.1.name must be text; got 1."),
        ({"first": {"name": "a", "share": math.nan}}, "it.first.share", "must lie between 0 and 1; got nan."),
    ],
)
def test_an_error_names_field_rule_and_value(values: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(FieldError) as found:
        build(Order, {"ids": [], **values} if values else {}, "it." if values else "")
    assert message in str(found.value) and found.value.field == field


def test_python_is_refused_as_json_is() -> None:
    with pytest.raises(FieldError, match=r"share must lie between 0 and 1; got 1\."):
        Part("a", 1)
    with pytest.raises(FieldError, match=r"name must be text; got 3\."):
        Part(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ids", "kind", "loud", "z" * 10_000_000])
def test_messages_about_large_values_are_short(name: str) -> None:
    with pytest.raises(FieldError) as found:
        build(Order, {"ids": [], name: "y" * 10_000_000})
    assert len(str(found.value)) < 700


def test_fields_have_docstrings() -> None:
    assert docstrings(Order) == {"ids": "Ids of ``things``.\nThey may be many."}


def test_modules_without_source_have_no_docstrings_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", no_source)
    _docstrings_in.cache_clear()
    assert docstrings(Order) == {}
    _docstrings_in.cache_clear()
