"""Answer to one request: the pieces of all its choices as they are generated."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from gecko.inference.request import Event, Token
from gecko.inference.text import ChoiceText, Piece, TokenText
from gecko.serving.limits import ApiError
from gecko.serving.metrics import Metrics
from gecko.serving.protocol import Usage
from gecko.serving.worker import RequestGroup


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
