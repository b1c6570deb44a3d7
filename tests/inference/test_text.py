"""Text: encoded in pieces, decoded as tokens arrive, ended by stop strings."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gecko
from gecko.cli.arguments import InputText, TokenReader
from gecko.data import ByteTokenizer, TokenizedCorpus, Tokenizer, document_ids, document_stream
from gecko.inference import NewToken, Sampling, TextStream, TokenStream, encode_stream, read
from gecko.inference.text import StopStrings

# ---- Tokens are decoded as they arrive, up to a stop string.


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
    text = TextStream(script, tokenizer, [stop])
    assert "".join(text) == TEXT.partition(stop)[0]
    assert text.stopped_by == (stop if stop in TEXT else None)
    assert script.stopped == (stop in TEXT)


def test_pieces_come_as_soon_as_they_are_whole(tokenizer: Tokenizer) -> None:
    """What is not whole at the end is shown; only bytes end inside a character at will."""
    ids = tokenizer.encode("the dog").tolist()
    assert len(list(TextStream(Script(ids), tokenizer))) == len(ids)
    if tokenizer.name == "bytes":
        assert "".join(TextStream(Script([97, 0xE4, 0xBD]), tokenizer, ["zz"])) == "a\ufffd"


class Letters:
    """Tokenizer in which every id is a letter."""

    name, vocab_size, special_ids = "letters", 264, frozenset[int]()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(ord("a") + index % 26) for index in ids)


def test_the_state_has_read_the_stop_string(model: gecko.Gecko) -> None:
    def continuation(stops: list[str]) -> TextStream:
        reading = read(model, [torch.tensor([1, 2, 3])])
        tokens = TokenStream(model, [reading], seeds=[3], sampling=Sampling(1.0), max_new_tokens=30)
        return TextStream(tokens, Letters(), stops)

    whole = "".join(continuation([]))
    stop = whole[10:13]
    stopped = continuation([stop])
    assert "".join(stopped) == whole.partition(stop)[0]
    assert stopped.tokens.finish_reasons == ["stop"]
    assert stopped.num_tokens == whole.index(stop) + 3
    assert stopped.tokens.state.position == [3 + stopped.num_tokens]


# ---- Stop strings: the text ends before the first one, and text is held back no longer than necessary.

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
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings([*stops, ""])


# ---- Encoding a text in pieces gives the ids of the whole text.

CONFIG = gecko.GeckoConfig.preset("tiny", num_layers=1)
WORDS = st.sampled_from(["the", "quick", "jumps", "naïve", "你好", "🎉", "x", "\n", "\n\n", "  ", "lazy dog", "qqqq"])


def joined(tokenizer: Tokenizer, content: bytes, cuts: list[int], block: int) -> list[int]:
    borders = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    pieces = [content[a:b] for a, b in itertools.pairwise(borders)]
    parts = list(encode_stream(tokenizer, pieces, "the text", block=block))
    assert all(part.dtype == torch.int64 and part.dim() == 1 for part in parts)
    return torch.cat(parts).tolist() if parts else []


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(WORDS, max_size=400), cuts=st.lists(st.integers(0, 3000), max_size=4), block=st.integers(300, 900)
)
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, words: list[str], cuts: list[int], block: int) -> None:
    """Also if the text is one long word, or the bytes are no text."""
    text = " ".join(words)
    assert joined(tokenizer, text.encode(), cuts, block) == tokenizer.encode(text).tolist()
    assert tokenizer.decode(joined(tokenizer, b"quick" * 500, cuts, block)) == "quick" * 500
    assert joined(ByteTokenizer(), bytes(range(256)) * 3, cuts, block) == list(range(256)) * 3


def test_only_a_block_is_held(tokenizer: Tokenizer) -> None:
    taken = 0

    def pieces() -> object:
        nonlocal taken
        for _ in range(50):
            taken += 1
            yield b"the lazy dog jumps " * 10

    ids = encode_stream(tokenizer, pieces(), "the text", block=512)
    next(ids)
    assert taken < 10


@pytest.fixture
def of_texts(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that does not take any bytes."""
    if isinstance(tokenizer, ByteTokenizer):
        pytest.skip("the tokenizer of bytes takes any bytes")
    return tokenizer


@pytest.mark.parametrize("cuts", [[], [5, 6], [1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize(
    ("content", "offset"),
    [("naïv".encode() + b"\xffabc", 5), ("aä".encode() + b"\xe4\xbdA", 3), (b"abc\0def", 3), (b"abcde\xe4\xbd", 5)],
)
def test_what_is_no_text_is_refused_with_its_place(
    of_texts: Tokenizer, content: bytes, offset: int, cuts: list[int]
) -> None:
    with pytest.raises(ValueError, match=f"the text must be UTF-8.*byte offset {offset}\\."):
        joined(of_texts, content, cuts, 300)


def test_a_byte_order_mark_is_no_text(of_texts: Tokenizer) -> None:
    assert joined(of_texts, "\ufeffthe dog".encode(), [1, 2], 300) == of_texts.encode("the dog").tolist()


@pytest.mark.parametrize("text", ["", "the quick", "\ufeffnaïve 🎉", " a\n", "<|endoftext|> </s>"])
def test_every_way_from_text_to_a_document_is_that_of_gecko_read(tokenizer: Tokenizer, text: str) -> None:
    content = text.encode()
    state = gecko.Gecko(CONFIG).empty_state()
    for before in (None, state):
        with TokenReader([InputText("the text", [content], None)], tokenizer) as reading:
            read = torch.cat([torch.empty(0, dtype=torch.int64), *reading.tokens(begin=before is None)])
        assert torch.equal(document_ids(tokenizer, text, state=before), read)
        pieces = [content[:3], content[3:]]
        streamed = document_stream(tokenizer, pieces, "the text", state=before)
        assert torch.cat([torch.empty(0, dtype=torch.int64), *streamed]).tolist() == read.tolist()
    if text and not text.startswith("\ufeff"):
        documents = TokenizedCorpus.build([text], tokenizer)
        assert [*document_ids(tokenizer, text).tolist(), tokenizer.document_end] == documents.tokens.tolist()


def test_examples_start_documents() -> None:
    """Programs and pages turn a text into ids by these two functions alone."""
    root = Path(gecko.__file__).parents[2]
    places = ("README.md", "docs/*.md", "examples/*.py", "src/gecko/shipped/*/*.md")
    files = [path for place in places for path in root.glob(place)]
    assert not [path for path in files if re.search(r"tokenizer\.encode\(|encode_stream\(", path.read_text())]
