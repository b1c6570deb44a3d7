"""Tokens to pieces of text: for any division, the pieces join to the text before the stop string."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gecko.data import Tokenizer, load_tokenizer
from gecko.inference.request import Token
from gecko.inference.text import ChoiceText, Piece
from gecko.serving.replies import ChatReply, CompletionReply, Usage, encode_answer

BYTES = load_tokenizer("bytes")
TEXTS = st.text(alphabet="aboé🎉 ", max_size=30)


def pieces_of(
    text: bytes, stops: list[str], *, logprobs: bool = False, min_tokens: int = 0, echo: str = ""
) -> list[Piece]:
    choice = ChoiceText(0, BYTES, stops, 100, min_tokens=min_tokens, echo=echo)
    pieces = []
    for number, byte in enumerate(text):
        told = (-float(number), ((byte, -float(number)),)) if logprobs else (None, ())
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


@given(st.text(alphabet="ab", max_size=30), st.integers(0, 12))
def test_the_text_of_the_first_tokens_may_contain_a_stop_string(text: str, least: int) -> None:
    pieces = pieces_of(text.encode(), ["ab"], min_tokens=least, echo="é ab ")
    end = text.find("ab", least)
    assert "".join(piece.text for piece in pieces) == "é ab " + (text if end < 0 else text[:end])
    assert pieces[-1].finish_reason == ("length" if end < 0 else "stop")


@given(TEXTS, st.sampled_from(["", "é b"]))
def test_every_token_is_told_once_and_in_place(text: str, echo: str) -> None:
    content = text.encode()
    tokens = [token for piece in pieces_of(content, ["zz"], logprobs=True, echo=echo) for token in piece.tokens]
    assert [token.chosen.logprob for token in tokens] == [-float(number) for number in range(len(content))]
    for token, byte in zip(tokens, content, strict=True):
        assert token.chosen.name == (chr(byte) if byte < 128 else f"token_id:{byte}")
        assert byte >= 128 or (echo + text)[token.offset] == token.chosen.text


def test_what_is_no_text_has_no_bytes() -> None:
    """Two bytes of é, with the alternatives of each: a letter, and the end of the document."""
    choice = ChoiceText(0, BYTES, [], 0)
    for byte in "é".encode():
        piece = choice.push(Token(0, byte, -1.0, ((97, -0.5), (256, -2.0))))
    assert piece is not None
    for told in next(iter(ChatReply("m").events(piece)))["choices"][0]["logprobs"]["content"]:
        assert [(other["token"], other["bytes"]) for other in (told, *told["top_logprobs"])] == [
            (told["token"], None), ("a", [97]), ("token_id:256", None)
        ]  # fmt: skip


def test_words_and_parts_of_words_have_names_of_their_own(spaced: Tokenizer) -> None:
    """The space before a word is part of its name, also at the beginning of a text."""
    choice, words = ChoiceText(0, spaced, [], 0), spaced.encode("the the").tolist()
    word, part = words[-1], spaced.encode("athe").tolist()[-1]
    piece = choice.push(Token(0, word, -1.0, ((word, -1.0), (part, -2.0))))
    told = next(iter(CompletionReply("m").events(piece or choice.finish("length"))))["choices"][0]["logprobs"]
    assert told["tokens"] == [" the"]
    assert told["top_logprobs"] == [{" the": -1.0, "the": -2.0}]


def test_a_broken_character_comes_at_the_end() -> None:
    assert [piece.text for piece in pieces_of("aé".encode()[:2], [])] == ["a", "\ufffd"]


def test_numbers_that_json_lacks_are_not_written() -> None:
    choice = ChoiceText(0, BYTES, [], 0)
    piece = choice.push(Token(0, 97, -math.inf, ((97, -math.inf), (98, 0.0))))
    assert piece is not None
    for reply in (CompletionReply("m"), ChatReply("m")):
        for body in (*reply.events(piece), reply.whole([piece], Usage(1, 1, 8))):
            json.dumps(body, allow_nan=False)


def test_answers_are_encoded_as_by_json() -> None:
    pieces = pieces_of('aü"\0'.encode(), [], logprobs=True)
    whole = [Piece(index, 'aü"\0', pieces[0].tokens, 4, "stop") for index in range(2)]
    long = replace(whole[0], tokens=pieces[0].tokens * 3000)
    for reply, found in ((ChatReply("small"), whole), (CompletionReply("small"), whole), (ChatReply("b"), [long])):
        answer = reply.whole(found, Usage(1, 2, 3))
        assert encode_answer(answer) == json.dumps(answer, separators=(",", ":"))
