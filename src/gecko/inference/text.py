"""Incremental detokenization: generated tokens to pieces of text, which end before a stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from gecko.data import StreamDecoder, Tokenizer
from gecko.data.text_stream import REPLACEMENT, letter
from gecko.inference.calls import CallPart, CallReader, overlap
from gecko.inference.generate import LlamaStream, TokenStream
from gecko.inference.request import PromptScores, Request, Token


def check_stops(stops: Sequence[str]) -> None:
    """Raise ValueError if a stop string is empty."""
    if not all(stops):
        raise ValueError(f"a stop string must have at least one character; got {list(stops)}.")


class StopStrings:
    """Filter that passes text on until one of ``stops`` is complete; a possible start of one is held back. If several
    end together, the longest one ends the text. Raise ValueError for an empty stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        check_stops(stops)
        self._stops, self._held = stops, ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that cannot belong to a stop string; none after a stop string is complete."""
        if self.matched is not None:
            return ""
        self._held += text
        ends = [(self._held.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if ends:
            end, size, self.matched = min(ends)
            passed, self._held = self._held[: end + size], ""
            return passed
        cut = len(self._held) - overlap(self._held, self._stops)
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


S = TypeVar("S", bound=TokenStream | LlamaStream)


class TextStream(Generic[S]):
    """Iterator over the text of one row, piece by piece; iterate once.

    A piece is yielded as soon as its characters are complete and cannot belong to a stop string. The stop string itself
    is not yielded, but the state of the row has read it. Raise ValueError for an empty stop string.

    Args:
        tokens: a stream of one row.
        stops: stop strings; the text ends before the first of them.
        goes_on: whether the row follows other text, as for ``StreamDecoder``.
    """

    def __init__(self, tokens: S, tokenizer: Tokenizer, stops: Sequence[str] = (), *, goes_on: bool = False) -> None:
        self.tokens = tokens
        self.num_tokens = 0
        """Number of tokens generated so far."""
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


class TokenNames:
    """Texts of tokens inside a longer text, each decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoded after a letter, because SentencePiece drops the leading space of the first token of a text.
        self._letter = letter(tokenizer)
        self._skipped = len(tokenizer.decode(self._letter))
        self._texts: dict[int, str | None] = {}

    def text(self, token: int) -> str | None:
        """Return the text of a token; None if it has none by itself, as a part of a character."""
        if token not in self._texts:
            text = self._tokenizer.decode([*self._letter, token])[self._skipped :]
            self._texts[token] = None if REPLACEMENT in text else text or None
        return self._texts[token]

    def name(self, token: int) -> str:
        """Return the text of a token, or its number if it has none."""
        text = self.text(token)
        return f"token_id:{token}" if text is None else text

    def places(self, scores: PromptScores) -> Iterator[PlacedToken]:
        """Yield the tokens of a prompt; the first one has no log-probabilities. A long prompt takes seconds."""
        decoder, offset = StreamDecoder(self._tokenizer), 0
        rest = zip(*(column.tolist() for column in scores[1:]), strict=True)
        columns = chain([(None, (), ())], rest)
        for token, (logprob, top_ids, top_logprobs) in zip(scores.tokens.tolist(), columns, strict=True):
            yield Token(0, token, logprob, tuple(zip(top_ids, top_logprobs, strict=True))), offset
            offset += len(decoder.push([token]))


PlacedToken = tuple[Token, int]
"""A token with log-probabilities, and the characters of its choice's text before it."""


@dataclass(frozen=True)
class Piece:
    """New text of one choice."""

    choice: int
    text: str
    tokens: tuple[PlacedToken, ...]
    """Tokens since the last piece, if log-probabilities were requested."""
    position: int
    """Tokens that the state of the choice has read."""
    finish_reason: str | None = None
    calls: tuple[CallPart, ...] = ()
    """New parts of calls, which come after all text."""
    prompt: PromptScores | None = None
    """Log-probabilities of the prompt, in the first piece, if they were requested."""
    stop_token: PlacedToken | None = None
    """The stop token, which has no text, in the last piece, if log-probabilities were requested."""


class ChoiceText:
    """Incremental detokenizer of one choice of an answer, the tokens of ``request``. A piece is returned as soon as its
    characters are complete and cannot belong to a stop string; the text of the request's first ``min_new_tokens`` may
    contain them. The first piece begins with ``echo``, and has the log-probabilities of the prompt if the request asks
    for them. ``reader`` finds calls of functions."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer, stops: Sequence[str] = (), *, goes_on: bool = False,
        echo: str = "", reader: CallReader | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.num_tokens = 0
        self.awaits_scores = request.prompt_logprobs is not None
        """Whether the log-probabilities of the prompt are still missing."""
        self._start, self._min_tokens = request.start_position + len(request.prompt), request.min_new_tokens
        self._decoder, self._stops = StreamDecoder(tokenizer, goes_on=goes_on), StopStrings(stops)
        self._echo, self._decoded = echo, len(echo)
        self._reader, self.marks = reader, {} if reader is None else reader.marks
        """Texts of special tokens in calls, by their ids."""
        self._written: list[str] = []
        self._prompt: PromptScores | None = None
        self._unsent: list[PlacedToken] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string, or the end of the calls, has ended the text."""
        return self._stops.matched is not None or (self._reader is not None and self._reader.stopped)

    @property
    def unclosed(self) -> bool:
        """Whether the text ends with the object of a call, without what closes it."""
        return self._reader is not None and self._reader.unclosed

    @property
    def written(self) -> str:
        """The text as the model wrote it, with its tool calls."""
        text = "".join(self._written)
        return text[: self._reader.end] if self._reader is not None and self._reader.stopped else text

    def begin(self, scores: PromptScores) -> None:
        """Take the log-probabilities of the prompt, which become part of the first piece."""
        self._prompt, self.awaits_scores = scores, False

    def push(self, token: Token) -> Piece | None:
        """Return the piece that ``token`` completes, if any; the last one if it completes a stop string."""
        self.num_tokens += 1
        if token.logprob is not None:
            self._unsent.append((token, self._decoded))
        decoded = self._decoder.push([token.token]) + self.marks.get(token.token, "")
        self._decoded += len(decoded)
        text, calls = self._read(self._stops.push(decoded) if self.num_tokens > self._min_tokens else decoded)
        if self.stopped:
            return self._piece(text, calls, "stop")
        return self._piece(text, calls) if text or calls else None

    def finish(self, reason: str, stop_token: Token | None = None) -> Piece:
        """Return the last piece, with the text that was held back."""
        stop = None if stop_token is None else (stop_token, self._decoded)
        text, calls = self._read(self._stops.push(self._decoder.flush()) + self._stops.flush())
        return self._piece(text, calls, reason, stop)

    def _read(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """Return the text and the calls that the next text decides."""
        self._written.append(text)
        return (text, ()) if self._reader is None else self._reader.push(text)

    def _piece(
        self, text: str, calls: tuple[CallPart, ...], reason: str | None = None, stop_token: PlacedToken | None = None
    ) -> Piece:
        if reason is not None and self._reader is not None:
            text += self._reader.flush()
            reason = "tool_calls" if reason == "stop" and self._reader.num_calls else reason
        tokens, self._unsent = tuple(self._unsent), []
        echo, self._echo, prompt, self._prompt = self._echo, "", self._prompt, None
        position = self._start + self.num_tokens
        return Piece(self.index, echo + text, tokens, position, reason, calls, prompt, stop_token)
