"""JSON that is parsed in steps equals that of the standard library, and bounds are enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gecko.serving.bodies import MAX_DEPTH, MAX_VALUES, read_json

VALUES: list[Any] = [
    None, True, 5, -1.5e3, "", 'a"\\\n\u00e9\U0001f600\ud800', [], {}, [[]], [{}], {"a": {}},
    [1, 2, "a", 3, [4], None, 5, 6.5],
    list(range(50_000)), [list(range(20_000)), ["x", 1]], {"prompt": [1, 2], "n": 3, "t": [0.5, -1e-7]}, ["a"] * 1000,
    10**400, [10**400, 1],
]  # fmt: skip


@pytest.mark.parametrize("spaces", [{"separators": (",", ":")}, {"indent": 3}, {"ensure_ascii": True}], ids=range(3))
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_it_reads_what_the_library_reads(value: Any, spaces: dict[str, Any]) -> None:
    assert read_json(f" {json.dumps(value, **spaces)}\n".encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "[", "{", "]", "[1", "[1,", "[1,]", "[,1]", "[1,,2]", "[1 2]", "[1}", '{"a"}', '{"a":}', '{"a":1,}',
        "{1:2}",
        '{"a":1 "b":2}', "1 2", '"a', '"\n"', '"\\x"', "nul", "[nul]", "01", "[01]", "+1", "[+1]", "[1.]", "-", "[-]",
        "[" + "1" * 40_000 + "]", "9" * 5_000, "[" + "1," * 40_000 + "]", "\ufeff\ufeff1",
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="at character"):
        read_json(text.encode())


def test_invalid_utf8_is_refused() -> None:
    with pytest.raises(ValueError, match="at byte 1"):
        read_json(b'"\xff"')


def test_bounds() -> None:
    assert len(read_json(json.dumps(["a"] * (MAX_VALUES - 1)).encode())) == MAX_VALUES - 1
    read_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    for text, told in (
        (json.dumps(["a"] * MAX_VALUES), "100,000"),
        (json.dumps({str(i): i for i in range(MAX_VALUES // 2 + 1)}), "100,000"),
        ("[[]," * MAX_VALUES, "32 deep"),
        ("[" + "[]," * MAX_VALUES, "100,000"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "32 deep"),
    ):
        with pytest.raises(ValueError, match=told):
            read_json(text.encode())
