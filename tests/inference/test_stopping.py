"""Stop strings: the text ends before the first one, and text is held back no longer than necessary."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gecko.inference.text import StopStrings

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that ends first (the longest of those), and that string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_borders_of_pieces_do_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    matcher = StopStrings(stops)
    passed = [matcher.push(text[a:b]) for a, b in itertools.pairwise(borders)]
    expected, matched = cut(text, stops)
    assert "".join(passed) + matcher.flush() == expected
    assert matcher.matched == matched


@given(text=TEXTS, stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher, passed = StopStrings(stops), ""
    for count, character in enumerate(text, start=1):
        passed += matcher.push(character)
        if matcher.matched is not None:
            break
        held = text[len(passed) : count]
        assert passed + held == text[:count]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])
