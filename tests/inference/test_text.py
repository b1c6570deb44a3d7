"""Tokens are decoded as they arrive, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

import gecko
from gecko.data import Tokenizer
from gecko.inference import NewToken, Sampling, TextStream, TokenStream, read


class Script:
    """A stream of given tokens that replaces a model."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.stopped = tokens, False

    def __iter__(self) -> Iterator[NewToken]:
        for token in self.tokens:
            if self.stopped:
                return
            yield NewToken(0, token)

    def stop(self, row: int) -> None:
        self.stopped = row == 0


TEXT = "the quick naïve café 你好 🎉 over the lazy dog"


@pytest.mark.parametrize("stop", ["quick", "ck na", "ïve", "你", "好 🎉", "g", "absent", " the"])
def test_text_ends_before_the_stop_string_wherever_tokens_end(tokenizer: Tokenizer, stop: str) -> None:
    script = Script(tokenizer.encode(TEXT).tolist())
    text = TextStream(script, tokenizer, [stop])  # type: ignore[arg-type]
    assert "".join(text) == TEXT.partition(stop)[0]
    assert text.stopped_by == (stop if stop in TEXT else None)
    assert script.stopped == (stop in TEXT)


def test_pieces_come_as_soon_as_they_are_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the dog").tolist()
    text = TextStream(Script(ids), tokenizer)  # type: ignore[arg-type]
    assert len(list(text)) == len(ids)


def test_an_incomplete_character_at_the_end_is_shown(tokenizer: Tokenizer) -> None:
    if tokenizer.name != "bytes":
        pytest.skip("only bytes end inside a character at will")
    text = TextStream(Script([97, 0xE4, 0xBD]), tokenizer, ["zz"])  # type: ignore[arg-type]
    assert "".join(text) == "a\ufffd"


class Letters:
    """Tokenizer in which every id is a letter."""

    name, vocab_size, special_ids = "letters", 264, frozenset[int]()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(ord("a") + index % 26) for index in ids)


def test_the_state_has_read_the_stop_string(model: gecko.Gecko) -> None:
    def continuation(stops: list[str]) -> TextStream:
        reading = read(model, [torch.tensor([1, 2, 3])])
        tokens = TokenStream(model, [reading], seeds=[3], sampling=Sampling(1.0), max_new_tokens=30)
        return TextStream(tokens, Letters(), stops)  # type: ignore[arg-type]

    whole = "".join(continuation([]))
    stop = whole[10:13]
    stopped = continuation([stop])
    assert "".join(stopped) == whole.partition(stop)[0]
    assert stopped.tokens.finish_reasons == ["stop"]
    assert stopped.num_tokens == whole.index(stop) + 3
    assert stopped.tokens.state.position == [3 + stopped.num_tokens]
