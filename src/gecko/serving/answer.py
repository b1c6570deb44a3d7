"""Answer to one request: the pieces of all its choices as they are generated, and their form in OpenAI's API.

Gecko adds ``position`` of each choice, the number of tokens that its state has read, and ``usage.state_bytes``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gecko.inference.request import Event, PromptRead, Token
from gecko.inference.text import ChoiceText, Piece, PromptText, TokenLogprob, TokenText
from gecko.serving.limits import ApiError
from gecko.serving.metrics import Metrics
from gecko.serving.worker import RequestGroup

_PART = 1 << 10
"""Elements of a list that are encoded at once."""
_MIN_LOGPROB = -9999.0
"""Replaces a log-probability of minus infinity, which JSON cannot represent."""


@dataclass(frozen=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    state_bytes: int
    """Size of the state of one sequence, which is constant."""

    @property
    def json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens, "state_bytes": self.state_bytes,
        }  # fmt: skip


def encode_json(value: Any) -> str:
    """Return JSON in ASCII: some clients split a stream at U+2028 and others, and UTF-8 has no lone surrogates."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def encode_answer(answer: dict[str, Any]) -> bytes:
    """Encode an answer with many calls of ``json.dumps``: a call holds the GIL until it returns."""
    return _encode_object(answer).encode()


def _encode_object(value: dict[str, Any]) -> str:
    return f"{{{','.join(f'{encode_json(name)}:{_encode_field(name, item)}' for name, item in value.items())}}}"


def _encode_field(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return _encode_object(value)
    if not isinstance(value, list):
        return encode_json(value)
    if name == "choices":
        return f"[{','.join(map(_encode_object, value))}]"
    parts = (value[begin : begin + _PART] for begin in range(0, len(value), _PART))
    return f"[{','.join(encode_json(part)[1:-1] for part in parts)}]"


class Reply(Protocol):
    """Format of one kind of answer."""

    def opening(self, choices: int) -> Iterable[dict[str, Any]]:
        """Return the chunks before the first text."""

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the chunk of a piece."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk of a stream, sent if ``include_usage`` is set."""

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """Return the whole answer, from one piece per choice."""


class _Base:
    def __init__(self, prefix: str, model: str) -> None:
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}


class CompletionReply(_Base):
    """Format of answers of ``/v1/completions``."""

    def __init__(self, model: str) -> None:
        super().__init__("cmpl", model)

    def opening(self, choices: int) -> Iterable[dict[str, Any]]:
        return ()

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._body("text_completion", [_text_choice(piece)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._body("text_completion", []) | {"usage": usage.json}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return self._body("text_completion", list(map(_text_choice, pieces))) | {"usage": usage.json}


class ChatReply(_Base):
    """Format of answers of ``/v1/chat/completions``; ``scored``: whether they have log-probabilities."""

    def __init__(self, model: str, scored: bool = False) -> None:
        super().__init__("chatcmpl", model)
        self._scored = scored

    def opening(self, choices: int) -> Iterable[dict[str, Any]]:
        """Return the role of each choice."""
        return [self._delta(index, {"role": "assistant", "content": ""}, None) for index in range(choices)]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._delta(piece.choice, {"content": piece.text} if piece.text else {}, piece)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._body("chat.completion.chunk", []) | {"usage": usage.json}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = []
        for piece in pieces:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choices.append({"message": message, **_chat_choice(piece.choice, piece, self._scored)})
        return self._body("chat.completion", choices) | {"usage": usage.json}

    def _delta(self, index: int, delta: dict[str, Any], piece: Piece | None) -> dict[str, Any]:
        return self._body("chat.completion.chunk", [{"delta": delta, **_chat_choice(index, piece)}])


def _text_choice(piece: Piece) -> dict[str, Any]:
    prompt = [] if piece.prompt is None else piece.prompt.tokens()
    # Clients that score prompts, such as lm-evaluation-harness, count on an entry for the stop token.
    ending = [] if piece.stop_token is None else [piece.stop_token]
    tokens = [*prompt, *piece.tokens, *ending]
    logprobs = _text_logprobs(tokens) if tokens else None
    return {"index": piece.choice, "text": piece.text, "logprobs": logprobs, **_progress(piece)}


def _chat_choice(index: int, piece: Piece | None, scored: bool = False) -> dict[str, Any]:
    logprobs = _chat_logprobs(piece.tokens) if piece is not None and (piece.tokens or scored) else None
    return {"index": index, "logprobs": logprobs, **_progress(piece)}


def _progress(piece: Piece | None) -> dict[str, Any]:
    if piece is None:
        return {"finish_reason": None}
    return {"finish_reason": piece.finish_reason, "position": piece.position}


def _text_logprobs(tokens: Sequence[TokenText]) -> dict[str, list[Any]]:
    return {
        "tokens": [token.chosen.name for token in tokens],
        "token_logprobs": [_number(token.chosen) for token in tokens],
        "top_logprobs": list(map(_text_top_logprobs, tokens)),
        "text_offset": [token.offset for token in tokens],
    }


def _text_top_logprobs(token: TokenText) -> dict[str, float | None] | None:
    if token.chosen.logprob is None:
        return None
    # Of tokens with equal names, the most likely one is kept.
    return {other.name: _number(other) for other in reversed(token.top_logprobs)}


def _chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, list[Any]]:
    return {
        "content": [
            _chat_token(token.chosen) | {"top_logprobs": [_chat_token(other) for other in token.top_logprobs]}
            for token in tokens
        ]
    }


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    content = None if token.text is None else list(token.text.encode())
    return {"token": token.name, "logprob": _number(token), "bytes": content}


def _number(token: TokenLogprob) -> float | None:
    return None if token.logprob is None else max(token.logprob, _MIN_LOGPROB)


class Answer:
    """Answer to a request. Iterate over ``pieces`` once or await ``whole``; always ``close`` it.

    Args:
        release: called once, by ``close``.
    """

    def __init__(
        self, running: RequestGroup, choices: Sequence[ChoiceText], metrics: Metrics, usage: Usage,
        release: Callable[[], None],
    ) -> None:  # fmt: skip
        self._running, self._choices, self._metrics, self._usage = running, choices, metrics, usage
        self._open = set(range(len(choices)))
        self._cleanup = ExitStack()
        self._cleanup.callback(release)
        self._cleanup.callback(running.close)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return replace(self._usage, completion_tokens=sum(choice.num_tokens for choice in self._choices))

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit of the request; negative after it."""
        return self._running.deadline - time.monotonic()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield new text of any choice until all choices are finished or the time limit is reached.

        Raises:
            ApiError: 504 if no token was generated within the time limit, 500 if the model fails, 503 if the server
                stops.
        """
        while self._open:
            event = await self._running.next()
            if event is None:
                found: list[Piece] = self._end_all()
            else:
                piece = self._take(*event) if event[0] in self._open else None
                found = [] if piece is None else [piece]
            for piece in found:
                if piece.finish_reason is not None and (piece.text or piece.tokens):
                    # Clients drop the text of a chunk that has a finish_reason.
                    yield replace(piece, finish_reason=None, stop_token=None)
                    piece = replace(piece, text="", tokens=(), prompt=None)
                yield piece

    async def whole(self) -> list[Piece]:
        """Return one piece per choice."""
        texts: list[list[str]] = [[] for _ in self._choices]
        tokens: list[list[TokenText]] = [[] for _ in self._choices]
        prompts: dict[int, PromptText | None] = {}
        last: dict[int, Piece] = {}
        async for piece in self.pieces():
            prompts.setdefault(piece.choice, piece.prompt)
            texts[piece.choice].append(piece.text)
            tokens[piece.choice] += piece.tokens
            last[piece.choice] = piece
        return [
            replace(last[index], text="".join(texts[index]), tokens=tuple(tokens[index]), prompt=prompts[index])
            for index in range(len(self._choices))
        ]

    def close(self) -> None:
        """Cancel the choices that are still running and release the places; idempotent."""
        self._drop("cancelled")
        self._cleanup.close()

    def _take(self, index: int, event: Event) -> Piece | None:
        choice = self._choices[index]
        if isinstance(event, Token):
            piece = choice.push(event)
            if choice.stopped:
                self._running.cancel(index)
        elif isinstance(event, PromptRead):
            choice.begin(event.scores)
            piece = None
        elif event.reason == "error":
            raise self._failed(event.error)
        elif event.reason == "constraint":
            self._drop("error")
            raise ApiError(400, f"the constraint cannot be fulfilled: {event.error}", code="invalid_constraint")
        elif event.reason == "cancelled":
            raise ApiError(503, "the server stopped before the answer was complete", code="shutting_down")
        else:
            piece = choice.finish(event.reason, event.stop_token)
        if piece is not None and piece.finish_reason is not None:
            self._end(index, piece.finish_reason)
        return piece

    def _failed(self, reason: str | None) -> ApiError:
        self._drop("error")
        return ApiError(500, f"the model failed on this request: {reason}", code="model_failed")

    def _end_all(self) -> list[Piece]:
        if not self.usage.completion_tokens or any(self._choices[index].awaits_scores for index in self._open):
            raise ApiError(504, "no token was generated within the time limit of a request; try later", code="timeout")
        pieces = [self._choices[index].finish("length") for index in sorted(self._open)]
        for piece in pieces:
            self._end(piece.choice, "time")
        return pieces

    def _drop(self, reason: str) -> None:
        """End all choices that are still open."""
        self._metrics.finished.labels(reason).inc(len(self._open))
        self._open.clear()

    def _end(self, index: int, reason: str) -> None:
        self._metrics.finished.labels(reason).inc()
        self._open.discard(index)
