"""Answer to one request: the pieces of all its choices as they are generated, sent until the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gecko.inference.calls import CallPart
from gecko.inference.request import Event, PromptRead, Token
from gecko.inference.text import ChoiceText, Piece, PromptText, TokenText
from gecko.serving.limits import ApiError, ClientGoneError
from gecko.serving.metrics import Metrics
from gecko.serving.replies import Usage
from gecko.serving.worker import RequestGroup

_SLICE_BYTES = 1 << 16
"""Maximum number of bytes of an answer that are handed to the connection at once."""
_SENDING_SECONDS = 5
"""Seconds to send the rest of a stream after the time limit of its request."""
T = TypeVar("T")


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
                if piece.finish_reason is not None and (piece.text or piece.tokens or piece.calls):
                    # Clients drop the text of a chunk that has a finish_reason.
                    yield replace(piece, finish_reason=None, stop_token=None)
                    piece = replace(piece, text="", tokens=(), calls=(), prompt=None)
                yield piece

    async def whole(self) -> list[Piece]:
        """Return one piece per choice."""
        texts: list[list[str]] = [[] for _ in self._choices]
        tokens: list[list[TokenText]] = [[] for _ in self._choices]
        calls: list[list[CallPart]] = [[] for _ in self._choices]
        prompts: dict[int, PromptText | None] = {}
        last: dict[int, Piece] = {}
        async for piece in self.pieces():
            prompts.setdefault(piece.choice, piece.prompt)
            texts[piece.choice].append(piece.text)
            tokens[piece.choice] += piece.tokens
            calls[piece.choice] += piece.calls
            last[piece.choice] = piece
        return [
            replace(
                last[index],
                text="".join(texts[index]),
                tokens=tuple(tokens[index]),
                calls=tuple(calls[index]),
                prompt=prompts[index],
            )
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
