"""Answer to one request: the pieces of all its choices as they are generated, sent until the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gecko.inference.request import Event, PromptRead, Token
from gecko.inference.text import ChoiceText, Piece
from gecko.serving.limits import ApiError, ClientGoneError
from gecko.serving.metrics import Metrics
from gecko.serving.prepare import Prepared
from gecko.serving.replies import Usage

_SLICE_BYTES = 1 << 16
"""Maximum number of bytes of an answer that are handed to the connection at once."""
_SENDING_SECONDS = 5
"""Seconds to send the rest of a stream after the time limit of its request."""
T = TypeVar("T")


class Answer:
    """Answer to one request, for the event loop. Iterate over ``pieces`` once or await ``whole``; always ``close`` it.

    Args:
        cancel: cancels requests of the engine by their ids; those of finished requests have no effect.
        arrival: when the client sent the request, in seconds of ``time.monotonic``.
        deadline: when the events end, in the same clock.
        release: called by ``close``; more than one call must have the effect of one.
    """

    def __init__(
        self, prepared: Prepared, cancel: Callable[[Sequence[int]], None], metrics: Metrics, arrival: float,
        deadline: float, release: Callable[[], None],
    ) -> None:  # fmt: skip
        self.reply, self.stream, self.num_choices = prepared.reply, prepared.stream, len(prepared.choices)
        self._prepared, self._cancel, self._metrics, self._release = prepared, cancel, metrics, release
        self._arrival, self._deadline = arrival, deadline
        self._choices: dict[int, ChoiceText] = {}
        """The choices by the ids of their requests."""
        self._open: set[int] = set()
        """Ids of the requests that are not finished."""
        self._last_token: dict[int, float] = {}
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        made = sum(choice.num_tokens for choice in self._prepared.choices)
        return replace(self._prepared.usage, completion_tokens=made)

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit of the request; negative after it."""
        return self._deadline - time.monotonic()

    def begin(self, ids: Sequence[int]) -> None:
        """Take the ids of the requests, in the order of choices; the worker calls this before the first ``put``."""
        self._choices = dict(zip(ids, self._prepared.choices, strict=True))
        self._open = set(ids)
        self._alarm = asyncio.get_running_loop().call_later(self.seconds_left, self._events.put_nowait, None)

    def put(self, event: Event, now: float) -> None:
        """Take an event of a request from the worker."""
        if isinstance(event, Token):
            before = self._last_token.get(event.request_id)
            if before is None:
                self._metrics.first_token.observe(now - self._arrival)
            else:
                self._metrics.between_tokens.observe(now - before)
            self._last_token[event.request_id] = now
        self._events.put_nowait(event)

    async def next(self) -> Event | None:
        """Return the next event of any choice; None after the time limit."""
        return await self._events.get()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield new text of any choice until all choices are finished or the time limit is reached. Raise ApiError 504
        if no token was generated within the time limit, 500 if the model fails, 503 if the server stops."""
        while self._open:
            event = await self.next()
            if event is None:
                found: list[Piece] = self._end_all()
            else:
                piece = self._take(event) if event.request_id in self._open else None
                found = [] if piece is None else [piece]
            for piece in found:
                if piece.finish_reason is not None and (piece.text or piece.tokens or piece.calls):
                    # Clients drop the text of a chunk that has a finish_reason.
                    yield replace(piece, finish_reason=None, stop_token=None)
                    piece = replace(piece, text="", tokens=(), calls=(), prompt=None)
                yield piece

    async def whole(self) -> list[Piece]:
        """Return one piece per choice."""
        found: list[list[Piece]] = [[] for _ in range(self.num_choices)]
        async for piece in self.pieces():
            found[piece.choice].append(piece)
        return [
            replace(
                parts[-1], text="".join(part.text for part in parts), prompt=parts[0].prompt,
                tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
                calls=tuple(chain.from_iterable(part.calls for part in parts)),
            )
            for parts in found
        ]  # fmt: skip

    def close(self) -> None:
        """Cancel the choices that are still running and release the places; idempotent."""
        self._drop("cancelled")
        if self._alarm is not None:
            self._alarm.cancel()
        self._cancel(list(self._choices))
        self._release()

    def _take(self, event: Event) -> Piece | None:
        choice = self._choices[event.request_id]
        if isinstance(event, Token):
            piece = choice.push(event)
            if choice.stopped:
                self._cancel([event.request_id])
        elif isinstance(event, PromptRead):
            choice.begin(event.scores)
            piece = None
        elif event.reason == "error":
            self._drop("error")
            raise ApiError(500, f"the model failed on this request: {event.error}", code="model_failed")
        elif event.reason == "constraint":
            self._drop("error")
            raise ApiError(400, f"the constraint cannot be fulfilled: {event.error}", code="invalid_constraint")
        elif event.reason == "cancelled":
            raise ApiError(503, "the server stopped before the answer was complete", code="shutting_down")
        else:
            piece = choice.finish(event.reason, event.stop_token)
        if piece is not None and piece.finish_reason is not None:
            self._metrics.finished.labels(piece.finish_reason).inc()
            self._open.discard(event.request_id)
        return piece

    def _end_all(self) -> list[Piece]:
        if not self.usage.completion_tokens or any(self._choices[index].awaits_scores for index in self._open):
            raise ApiError(504, "no token was generated within the time limit of a request; try later", code="timeout")
        pieces = [self._choices[index].finish("length") for index in sorted(self._open)]
        self._drop("time")
        return pieces

    def _drop(self, reason: str) -> None:
        """End all choices that are still open."""
        self._metrics.finished.labels(reason).inc(len(self._open))
        self._open.clear()


class EventStream(StreamingResponse):
    """Server-sent events of an answer, which is closed at their end or when the client disconnects.

    If the client does not read, the response ends ``_SENDING_SECONDS`` after the time limit of the request.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(chunks, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._answer.seconds_left + _SENDING_SECONDS):
                await unless_gone(receive, self.stream_response(send))
        except (ClientGoneError, TimeoutError):
            # uvicorn closes the connection of an unfinished response.
            pass
        finally:
            self._answer.close()


async def slices(content: bytes) -> AsyncIterator[bytes]:
    """Yield ``content`` in slices, so that the memory of the request counts until the client has read its answer."""
    for begin in range(0, len(content), _SLICE_BYTES):
        yield content[begin : begin + _SLICE_BYTES]


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``; cancel it and raise ClientGoneError if the client disconnects first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
