"""What one request gets: the pieces of all its continuations, as they are made."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from gecko.serving.errors import ApiError
from gecko.serving.metrics import Metrics
from gecko.serving.replies import Usage
from gecko.serving.request import Event, Token
from gecko.serving.text import ChoiceText, Piece
from gecko.serving.worker import Running


class Answer:
    """Iterate over ``pieces`` once, or take ``whole``; then ``close``, whatever happened.

    Args:
        release: called once by ``close``.
    """

    def __init__(
        self, running: Running, choices: Sequence[ChoiceText], metrics: Metrics, usage: Usage,
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
        """So far."""
        return replace(self._usage, completion_tokens=sum(choice.num_tokens for choice in self._choices))

    @property
    def seconds_left(self) -> float:
        """Until the time of the request is up; below 0 after that."""
        return self._running.deadline - time.monotonic()

    async def pieces(self) -> AsyncIterator[Piece]:
        """New text of any of the continuations, until all are finished or the time is up.

        Raises:
            ApiError: 504 if there is no token when the time is up, 500 if the model fails, 503 if the server ends.
        """
        while self._open:
            arrived = await self._running.next()
            if arrived is None:
                for last in self._time_is_up():
                    yield last
                return
            piece = self._take(*arrived) if arrived[0] in self._open else None
            if piece is not None:
                yield piece

    async def whole(self) -> list[Piece]:
        """One piece for each continuation."""
        parts: list[list[Piece]] = [[] for _ in self._choices]
        async for piece in self.pieces():
            parts[piece.choice].append(piece)
        return [
            replace(
                pieces[-1],
                text="".join(piece.text for piece in pieces),
                tokens=tuple(token for piece in pieces for token in piece.tokens),
            )
            for pieces in parts
        ]

    def close(self) -> None:
        """Frees what is still running. May be called again."""
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
            raise ApiError(503, "the server ended before the answer was complete", code="shutting_down")
        else:
            piece = choice.finish(event.reason)
        if piece is not None and piece.finish_reason is not None:
            self._end(index, piece.finish_reason)
        return piece

    def _failed(self, reason: str | None) -> ApiError:
        self._metrics.finished.labels("error").inc(len(self._open))
        self._open.clear()
        return ApiError(500, f"the model failed at this text: {reason}", code="model_failed")

    def _time_is_up(self) -> list[Piece]:
        if not self.usage.completion_tokens:
            raise ApiError(504, "no token was made within the time for a request; try later", code="timeout")
        pieces = [self._choices[index].finish("length") for index in sorted(self._open)]
        for piece in pieces:
            self._end(piece.choice, "time")
        return pieces

    def _end(self, index: int, reason: str) -> None:
        self._metrics.finished.labels(reason).inc()
        self._open.discard(index)
