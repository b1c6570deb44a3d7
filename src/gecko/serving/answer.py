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

from gecko.inference.request import Event, Token
from gecko.inference.text import ChoiceText, Piece, TokenLogprob, TokenText
from gecko.serving.limits import ApiError
from gecko.serving.metrics import Metrics
from gecko.serving.worker import RequestGroup

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
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_answer(answer: dict[str, Any]) -> bytes:
    """Encode an answer with one call of ``json.dumps`` per choice: a call holds the GIL until it returns."""
    fields = []
    for name, value in answer.items():
        content = f"[{','.join(map(encode_json, value))}]" if name == "choices" else encode_json(value)
        fields.append(f"{encode_json(name)}:{content}")
    return f"{{{','.join(fields)}}}".encode()


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
    """Format of answers of ``/v1/completions``.

    Args:
        echoes: text before the generated text of each choice; empty without ``echo``.
    """

    def __init__(self, model: str, echoes: Sequence[str]) -> None:
        super().__init__("cmpl", model)
        self.echoes = list(echoes)

    def opening(self, choices: int) -> Iterable[dict[str, Any]]:
        """Return a chunk per prompt that is echoed."""
        return [self._body("text_completion", [_text_choice(i, echo)]) for i, echo in enumerate(self.echoes) if echo]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._body("text_completion", [_text_choice(piece.choice, piece.text, piece)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._body("text_completion", []) | {"usage": usage.json}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [_text_choice(piece.choice, self.echoes[piece.choice] + piece.text, piece) for piece in pieces]
        return self._body("text_completion", choices) | {"usage": usage.json}


class ChatReply(_Base):
    """Format of answers of ``/v1/chat/completions``."""

    def __init__(self, model: str) -> None:
        super().__init__("chatcmpl", model)

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
            choices.append({"message": message, **_chat_choice(piece.choice, piece)})
        return self._body("chat.completion", choices) | {"usage": usage.json}

    def _delta(self, index: int, delta: dict[str, Any], piece: Piece | None) -> dict[str, Any]:
        return self._body("chat.completion.chunk", [{"delta": delta, **_chat_choice(index, piece)}])


def _text_choice(index: int, text: str, piece: Piece | None = None) -> dict[str, Any]:
    logprobs = _text_logprobs(piece.tokens) if piece is not None and piece.tokens else None
    return {"index": index, "text": text, "logprobs": logprobs, **_progress(piece)}


def _chat_choice(index: int, piece: Piece | None) -> dict[str, Any]:
    logprobs = _chat_logprobs(piece.tokens) if piece is not None and piece.tokens else None
    return {"index": index, "logprobs": logprobs, **_progress(piece)}


def _progress(piece: Piece | None) -> dict[str, Any]:
    if piece is None:
        return {"finish_reason": None}
    return {"finish_reason": piece.finish_reason, "position": piece.position}


def _text_logprobs(tokens: Sequence[TokenText]) -> dict[str, list[Any]]:
    return {
        "tokens": [token.generated.name for token in tokens],
        "token_logprobs": [_number(token.generated) for token in tokens],
        "top_logprobs": [{other.name: _number(other) for other in reversed(token.top_logprobs)} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, list[Any]]:
    return {
        "content": [
            _chat_token(token.generated) | {"top_logprobs": [_chat_token(other) for other in token.top_logprobs]}
            for token in tokens
        ]
    }


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    content = None if token.text is None else list(token.text.encode())
    return {"token": token.name, "logprob": _number(token), "bytes": content}


def _number(token: TokenLogprob) -> float:
    return max(token.logprob, _MIN_LOGPROB)


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
                for last in self._end_all():
                    yield last
                return
            piece = self._take(*event) if event[0] in self._open else None
            if piece is not None:
                yield piece

    async def whole(self) -> list[Piece]:
        """Return one piece per choice."""
        texts: list[list[str]] = [[] for _ in self._choices]
        tokens: list[list[TokenText]] = [[] for _ in self._choices]
        last: dict[int, Piece] = {}
        async for piece in self.pieces():
            texts[piece.choice].append(piece.text)
            tokens[piece.choice] += piece.tokens
            last[piece.choice] = piece
        return [
            replace(last[index], text="".join(texts[index]), tokens=tuple(tokens[index]))
            for index in range(len(self._choices))
        ]

    def close(self) -> None:
        """Cancel the choices that are still running and release the places; idempotent."""
        self._metrics.finished.labels("cancelled").inc(len(self._open))
        self._open.clear()
        self._cleanup.close()

    def _take(self, index: int, event: Event) -> Piece | None:
        choice = self._choices[index]
        if isinstance(event, Token):
            piece = choice.push(event)
            if choice.stopped:
                self._running.cancel(index)
        elif event.reason == "error":
            raise self._failed(event.error)
        elif event.reason == "cancelled":
            raise ApiError(503, "the server stopped before the answer was complete", code="shutting_down")
        else:
            piece = choice.finish(event.reason)
        if piece is not None and piece.finish_reason is not None:
            self._end(index, piece.finish_reason)
        return piece

    def _failed(self, reason: str | None) -> ApiError:
        self._metrics.finished.labels("error").inc(len(self._open))
        self._open.clear()
        return ApiError(500, f"the model failed on this request: {reason}", code="model_failed")

    def _end_all(self) -> list[Piece]:
        if not self.usage.completion_tokens:
            raise ApiError(504, "no token was generated within the time limit of a request; try later", code="timeout")
        pieces = [self._choices[index].finish("length") for index in sorted(self._open)]
        for piece in pieces:
            self._end(piece.choice, "time")
        return pieces

    def _end(self, index: int, reason: str) -> None:
        self._metrics.finished.labels(reason).inc()
        self._open.discard(index)
