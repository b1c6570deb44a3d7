"""Tokens to pieces of text: however they are cut, they join to the text before the stop string."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from gecko.data import load_tokenizer
from gecko.serving.replies import ChatReply, CompletionReply, Usage
from gecko.serving.request import Token
from gecko.serving.text import ChoiceText, Piece

BYTES = load_tokenizer("bytes")
TEXTS = st.text(alphabet="aboé🎉 ", max_size=30)


def pieces_of(text: bytes, stops: list[str], *, log_probabilities: bool = False) -> list[Piece]:
    choice = ChoiceText(0, BYTES, stops, 100)
    pieces = []
    for number, byte in enumerate(text):
        told = (-float(number), ((byte, -float(number)),)) if log_probabilities else (None, ())
        piece = choice.push(Token(0, byte, *told))
        if piece is not None:
            pieces.append(piece)
        if choice.stopped:
            return pieces
    return [*pieces, choice.finish("length")]


@given(TEXTS, st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3))
def test_pieces_join_to_the_text_before_the_stop(text: str, stops: list[str]) -> None:
    pieces = pieces_of(text.encode(), stops)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, minus = min(ends, default=(len(text), 0))
    assert "".join(piece.text for piece in pieces) == text[: end + minus]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop" if ends else "length"]
    assert all(piece.text for piece in pieces[:-1])
    assert pieces[-1].position == 100 + len(text[:end].encode())


@given(TEXTS)
def test_every_token_is_told_once_and_in_place(text: str) -> None:
    content = text.encode()
    tokens = [token for piece in pieces_of(content, ["zz"], log_probabilities=True) for token in piece.tokens]
    assert [token.log_probability for token in tokens] == [-float(number) for number in range(len(content))]
    for token, byte in zip(tokens, content, strict=True):
        assert token.text == (chr(byte) if byte < 128 else f"token_id:{byte}")
        assert byte >= 128 or text[token.offset] == token.text


def test_a_broken_character_comes_at_the_end() -> None:
    assert [piece.text for piece in pieces_of("aé".encode()[:2], [])] == ["a", "\ufffd"]


def test_numbers_that_json_lacks_are_not_written() -> None:
    choice = ChoiceText(0, BYTES, [], 0)
    piece = choice.push(Token(0, 97, -math.inf, ((97, -math.inf), (98, 0.0))))
    assert piece is not None
    for reply in (CompletionReply("m", [""]), ChatReply("m")):
        for body in (reply.chunk(piece), reply.whole([piece], Usage(1, 1, 8))):
            json.dumps(body, allow_nan=False)
