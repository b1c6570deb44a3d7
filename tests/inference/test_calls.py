"""Calls in the text of an answer are found in every form in use, however the text is cut; no half of one shows."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gecko.inference.calls import CallReader

NAMES = ["weather", "now"]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME, NOW = ("weather", {"city": "Rome"}), ("now", {})
CASES: dict[str, tuple[str, str, list[Any]]] = {
    "text": ("Hello <tool> {x} [TOOL] \n", "Hello <tool> {x} [TOOL] \n", []),
    "Hermes": (HERMES, "", [ROME]),
    "Hermes, arguments first": ('<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}\n', "", [ROME]),
    "after text": (f"I look.\n\n{HERMES}", "I look.", [ROME]),
    "two": (f'{HERMES}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n', "", [ROME, NOW]),
    "a list": ('<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', "", [NOW, NOW]),
    "Llama 3": ('{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    "Llama 3 after spaces": (' \n{"name": "now", "parameters": {}}', "", [NOW]),
    "Llama 3, two": ('{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", [NOW, NOW]),
    "Llama 3, tag": ('<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
    "Mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]', "", [ROME]),
    "Mistral, two": (
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "Rome"}}]',
        "", [NOW, ROME],
    ),
    "nested": ('<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}', "", [NOW]),
    "brackets in texts": (
        '{"name": "weather", "parameters": {"city": "}\\"]{ \\\\", "a": [{"b": "<tool_call>"}]}}',
        "", [("weather", {"city": '}"]{ \\', "a": [{"b": "<tool_call>"}]})],
    ),
    "JSON that is no call": ('{"answer": 5}', '{"answer": 5}', []),
    "an unknown function": ('{"name": "rm", "parameters": {}} x', '{"name": "rm", "parameters": {}} x', []),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
    "arguments that are a text": ('{"name": "now", "parameters": "x"}', '{"name": "now", "parameters": "x"}', []),
    "not JSON": ("<tool_call>{'name': 'now'}", "<tool_call>{'name': 'now'}", []),
    "an object later": ('See {"name": "now", "parameters": {}}', 'See {"name": "now", "parameters": {}}', []),
    "a marker alone": ("a <tool_call>\nno", "a <tool_call>\nno", []),
    "half a marker": ("a <tool_cal", "a <tool_cal", []),
    "an end inside": ('x{"name": <tool_call>{"name": "weather', 'x{"name": <tool_call>{"name": "weather', []),
    "text after a call": (f"{HERMES}\nThat is it. {HERMES}", "", [ROME]),
    "spaces": (" \n ", " \n ", []),
}  # fmt: skip


def read(pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, str]], CallReader]:
    """Return the text, the name and the arguments of each call, and the reader."""
    reader, said, calls = CallReader(NAMES, **options), "", {}
    for piece in pieces:
        if reader.stopped:
            break
        text, parts = reader.push(piece)
        assert not (text and reader.num_calls > len(parts)), "no text comes after a call"
        said += text
        for part in parts:
            assert bool(part.id) == bool(part.name) == (part.index not in calls)
            name, arguments = calls.setdefault(part.index, (part.name, ""))
            calls[part.index] = (name, arguments + part.arguments)
    return said + reader.flush(), list(calls.values()), reader


@pytest.mark.parametrize("case", CASES)
def test_forms(case: str) -> None:
    text, said, calls = CASES[case]
    for pieces in ([text], list(text)):
        found, read_calls, reader = read(pieces)
        assert (found, [(name, json.loads(arguments)) for name, arguments in read_calls]) == (said, calls)
        assert reader.num_calls == len(calls)


@given(st.sampled_from(sorted(CASES)), st.data())
def test_a_text_may_be_cut_anywhere(case: str, data: st.DataObject) -> None:
    text = CASES[case][0]
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[begin:end] for begin, end in pairwise(borders)]
    several = data.draw(st.booleans())
    whole, cut = read([text], several=several), read(pieces, several=several)
    assert cut[:2] == whole[:2]
    assert (cut[2].stopped, cut[2].end) == (whole[2].stopped, whole[2].end)


PARTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "}", '"name": ', '"now"', ",", '"arguments": ', "{}", " "]


@given(st.lists(st.sampled_from(PARTS), max_size=12))
def test_any_text_may_be_cut_anywhere_and_none_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    whole, cut = read([text]), read(list(text))
    assert cut[:2] == whole[:2]
    if not whole[1]:
        assert whole[0] == text


def test_no_half_marker_is_shown() -> None:
    reader, said = CallReader(NAMES), ""
    for character in f"I look. {HERMES}":
        said += reader.push(character)[0]
        assert "I look.".startswith(said)


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = CallReader(NAMES)
    parts = [part for character in HERMES for part in reader.push(character)[1]]
    assert len(parts) == 1 + len('{"city": "Rome"}')


def test_at_most_one_call() -> None:
    for text in (CASES["two"][0], CASES["Mistral, two"][0], CASES["a list"][0]):
        said, calls, reader = read(list(text), several=False)
        assert (said, len(calls), reader.stopped, reader.unclosed) == ("", 1, True, True)


def test_an_answer_that_begins_inside_of_a_call() -> None:
    said, calls, reader = read(list('{"name": "now", "arguments": {}}'), opened=True)
    assert (said, calls, reader.unclosed) == ("", [("now", "{}")], True)
    assert read(['{"name": "no'], opened=True)[:2] == ("", []), "what is cut is no text"
    assert read(['{"name": "now", "arguments": {"a'], opened=True)[:2] == ("", [("now", '{"a')])


def test_further_openings() -> None:
    found = read(['x <|tool_call|>[{"name": "now", "arguments": {}}]'], openings=["<|tool_call|>"])
    assert found[:2] == ("x", [("now", "{}")])


def test_long_texts_take_little_time() -> None:
    """Spaces, brackets and quotes are read once."""
    quoted, listed = '{"a": "' + '\\"' * 2000, '{"name": ' + "[" * 3000
    for text in (" " * 3000, "{" * 3000, quoted, "<tool_call>" * 300, "[" * 3000, listed):
        read(list(text))
        read(list("<tool_call>" + text))
