"""Tokens to text as they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from gecko.data import StreamDecoder, Tokenizer
from gecko.generation.stopping import StopStrings
from gecko.generation.stream import NewToken


class Tokens(Protocol):
    """Tokens as they are made, such as a ``TokenStream``."""

    def __iter__(self) -> Iterator[NewToken]: ...

    def stop(self, row: int) -> None: ...


S = TypeVar("S", bound=Tokens)


class TextStream(Generic[S]):
    """The text of one row, piece by piece; iterate once.

    A piece is given out as soon as its characters are whole and cannot belong to a stop string. The stop
    string itself is not given out; the row's state has read it.

    Args:
        tokens: a stream of one row.
        stops: the text ends before the first of these.
        goes_on: the row follows other text, as for ``StreamDecoder``.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, tokens: S, tokenizer: Tokenizer, stops: Sequence[str] = (), *, goes_on: bool = False) -> None:
        self.tokens = tokens
        self.num_tokens = 0
        """Tokens made so far."""
        self._decoder, self._stops = StreamDecoder(tokenizer, goes_on=goes_on), StopStrings(stops)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def __iter__(self) -> Iterator[str]:
        for row, token in self.tokens:
            self.num_tokens += 1
            yield from filter(None, [self._stops.push(self._decoder.push([token]))])
            if self.stopped_by is not None:
                self.tokens.stop(row)
                return
        yield from filter(None, [self._stops.push(self._decoder.flush()) + self._stops.flush()])
