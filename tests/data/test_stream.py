"""Ids that are not text are passed on with bounded work, and decode as the whole text would."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gecko.data import ByteTokenizer, StreamDecoder, load_tokenizer

PIECES = ("é".encode(), "你".encode(), "🎉".encode(), b"a", b"\x80", b"\xff", b"\xf0\x9f", b"\xf0\x9f\x8e", b"\xe4")
"""Whole characters, bytes that are no character, and truncated characters."""


class Recording(ByteTokenizer):
    longest = 0

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        self.longest = max(self.longest, len(ids))
        return super().decode(ids)


def stream(decoder: StreamDecoder, content: bytes) -> str:
    return "".join(decoder.push([byte]) for byte in content) + decoder.flush()


@settings(max_examples=300)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
@example([b"\x80"] * 11 + ["🎉".encode()])
@example([b"\xff"] * 7 + [b"\xf0\x9f\x8e"])
def test_any_bytes_decode_as_in_one_go(pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    assert stream(StreamDecoder(ByteTokenizer()), content) == content.decode(errors="replace")


def test_a_long_run_of_invalid_bytes_is_passed_on_as_it_comes() -> None:
    tokenizer = Recording()
    decoder = StreamDecoder(tokenizer)
    for junk in (b"\xff", b"\x80", b"\xf0\x9f", b"\xe4\xbd", b"\xf0\x9f\x8e\xff"):
        emitted = "".join(decoder.push([byte]) for byte in junk * 500)
        missing = (junk * 500).decode(errors="replace").removeprefix(emitted)
        assert len(missing) <= 8
        assert emitted + decoder.flush() == (junk * 500).decode(errors="replace")
        assert decoder.push(b"a") == "a"
    assert tokenizer.longest <= 16


@settings(max_examples=100)
@given(words=st.lists(st.sampled_from(["the", "quick", "é", "brown"]), min_size=2, max_size=8), data=st.data())
def test_a_text_that_goes_on_is_written_as_in_one_go(
    byte_fallback_file: Path, words: list[str], data: st.DataObject
) -> None:
    """Spaces before words are kept, also before the first word."""
    tokenizer = load_tokenizer(str(byte_fallback_file))
    before = " ".join(words[: data.draw(st.integers(1, len(words) - 1))])
    ids = tokenizer.encode(" ".join(words)).tolist()
    read = len(tokenizer.encode(before))
    assert tokenizer.decode(ids[:read]) == before
    decoder = StreamDecoder(tokenizer, goes_on=True)
    written = "".join(decoder.push([index]) for index in ids[read:]) + decoder.flush()
    assert before + written == " ".join(words)
