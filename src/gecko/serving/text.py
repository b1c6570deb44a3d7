"""Tokens of one continuation to pieces of text, with what is told about each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gecko.data import StreamDecoder, Tokenizer
from gecko.data.stream import REPLACEMENT, letter
from gecko.generation.stopping import StopStrings
from gecko.serving.request import Token


@dataclass(frozen=True)
class Chance:
    """A token and its log-probability."""

    token: int
    text: str | None
    """As it stands inside of a text; None for one that is none by itself, such as a part of a character."""
    log_probability: float

    @property
    def name(self) -> str:
        return f"token_id:{self.token}" if self.text is None else self.text


@dataclass(frozen=True)
class TokenText:
    """A token that was made, with log-probabilities."""

    made: Chance
    likeliest: tuple[Chance, ...]
    offset: int
    """Characters of the continuation before it."""


@dataclass(frozen=True)
class Piece:
    """What is new of one continuation."""

    choice: int
    text: str
    tokens: tuple[TokenText, ...]
    """Those since the last piece, where log-probabilities are wanted."""
    position: int
    """Where the reading state stands."""
    finish_reason: str | None = None


class ChoiceText:
    """The text of one continuation as its tokens come.

    A piece is given out as soon as its characters are whole and cannot belong to a stop string.

    Args:
        index: the continuation's number in the answer.
        position: of the reading state after the prompt.
        goes_on: it follows other text, as for ``StreamDecoder``.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], position: int, *, goes_on: bool = False
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self._tokenizer, self._start = tokenizer, position
        self._letter = letter(tokenizer)
        self._decoder, self._stops = StreamDecoder(tokenizer, goes_on=goes_on), StopStrings(stops)
        self._decoded = 0
        self._untold: list[TokenText] = []

    @property
    def stopped(self) -> bool:
        """A stop string was met; no more tokens are wanted."""
        return self._stops.matched is not None

    def push(self, token: Token) -> Piece | None:
        """The piece that ``token`` completes, if any; the last one if it completes a stop string."""
        self.num_tokens += 1
        if token.log_probability is not None:
            self._untold.append(self._describe(token, token.log_probability))
        decoded = self._decoder.push([token.token])
        self._decoded += len(decoded)
        text = self._stops.push(decoded)
        if self.stopped:
            return self._piece(text, "stop")
        return self._piece(text) if text else None

    def finish(self, reason: str) -> Piece:
        """The last piece, with what was held back."""
        return self._piece(self._stops.push(self._decoder.flush()) + self._stops.flush(), reason)

    def _piece(self, text: str, reason: str | None = None) -> Piece:
        tokens, self._untold = tuple(self._untold), []
        return Piece(self.index, text, tokens, self._start + self.num_tokens, reason)

    def _describe(self, token: Token, log_probability: float) -> TokenText:
        likeliest = tuple(self._chance(*other) for other in token.likeliest)
        return TokenText(self._chance(token.token, log_probability), likeliest, self._decoded)

    def _chance(self, token: int, log_probability: float) -> Chance:
        # After a letter: SentencePiece drops the space that a token begins with at the start of a text.
        before = self._tokenizer.decode(self._letter)
        text = self._tokenizer.decode([*self._letter, token])[len(before) :]
        return Chance(token, None if not text or REPLACEMENT in text else text, log_probability)
