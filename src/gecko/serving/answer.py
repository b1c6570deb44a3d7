"""Answers to requests, and the thread that runs the engine for them.

An answer has the pieces of all choices of its request as they are generated, sent until the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gecko.inference.request import Event, Finished, PromptRead, Request, Token
from gecko.inference.scheduler import Engine
from gecko.inference.text import ChoiceText, Piece
from gecko.serving.limits import ApiError, ClientGoneError, Metrics
from gecko.serving.prepare import Prepared
from gecko.serving.replies import Usage

_SLICE_BYTES = 1 << 16
"""Maximum number of bytes of an answer that are handed to the connection at once."""
_SENDING_SECONDS = 5
"""Seconds to send the rest of a stream after the time limit of its request."""
_LOG = logging.getLogger("gecko.serving")
T = TypeVar("T")


class Answer:
    """Answer to one request, for the event loop. Iterate over ``pieces`` once or await ``whole``; always ``close`` it.

    ``cancel`` cancels requests of the engine by their ids. ``arrival`` and ``deadline`` are when the client sent the
    request and when the events end, in seconds of ``time.monotonic``. ``close`` calls ``release``, which may be called
    again.
    """

    def __init__(
        self, prepared: Prepared, cancel: Callable[[Sequence[int]], None], metrics: Metrics, arrival: float,
        deadline: float, release: Callable[[], None],
    ) -> None:  # fmt: skip
        self.reply, self.stream, self.num_choices = prepared.reply, prepared.stream, len(prepared.choices)
        self._prepared, self._cancel, self._metrics, self._release = prepared, cancel, metrics, release
        self._arrival, self._deadline = arrival, deadline
        self._choices: dict[int, ChoiceText] = {}
        self._open: set[int] = set()
        self._last_token: dict[int, float] = {}
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        made = sum(choice.num_tokens for choice in self._prepared.choices)
        return self._prepared.usage._replace(completion_tokens=made)

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
            for piece in self._end_all() if event is None else self._take(event):
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

    def _take(self, event: Event) -> list[Piece]:
        """Return the piece that an event completes, if any."""
        choice = self._choices[event.request_id]
        if event.request_id not in self._open:
            return []
        if isinstance(event, PromptRead):
            choice.begin(event.scores)
            return []
        if isinstance(event, Token):
            piece = choice.push(event)
            if choice.stopped:
                self._cancel([event.request_id])
        elif event.reason == "cancelled":
            raise ApiError(503, "the server stopped before the answer was complete", code="shutting_down")
        elif event.reason in ("error", "constraint"):
            self._drop("error")
            if event.reason == "error":
                raise ApiError(500, f"the model failed on this request: {event.error}", code="model_failed")
            raise ApiError(400, f"the constraint cannot be fulfilled: {event.error}", code="invalid_constraint")
        else:
            piece = choice.finish(event.reason, event.stop_token)
        if piece is not None and piece.finish_reason is not None:
            self._metrics.finished.labels(piece.finish_reason).inc()
            self._open.discard(event.request_id)
        return [] if piece is None else [piece]

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


class WorkerClosedError(RuntimeError):
    """The engine thread has stopped or is stopping."""


class Worker:
    """Thread that runs the steps of the engine while it has requests.

    The methods are for the event loop; only the thread accesses the engine. Commands of the event loop are executed in
    order between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._closing, self._changed = engine, False, threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._running: dict[int, Answer] = {}
        self._alive: set[int] = set()
        self._thread = threading.Thread(target=self._work, name="gecko-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; call this on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and not self._closing

    async def submit(self, requests: Sequence[Request], answer: Answer) -> None:
        """Submit requests to the engine, all or none; ``answer`` gets their events. Raise ValueError, TypeError or
        QueueFullError if the engine refuses one of the requests, WorkerClosedError if the worker is closed."""
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ids: list[int] = []  # filled by the thread

        def settle(error: Exception | None) -> None:
            if accepted.cancelled():
                return
            if error is not None:
                accepted.set_exception(error)
                return
            answer.begin(ids)
            self._running.update(dict.fromkeys(ids, answer))
            accepted.set_result(None)

        if not self._post(lambda: self._submit(requests, ids, settle)):
            raise WorkerClosedError("the engine has stopped")
        try:
            await accepted
        except asyncio.CancelledError:
            if accepted.cancelled():
                # Cancel in the engine now: the places must be free there before later requests are submitted.
                self._post(lambda: self._cancel(ids))
            elif accepted.exception() is None:
                # The engine accepted the requests at the same moment as the caller was cancelled.
                answer.close()
            raise

    def cancel(self, ids: Sequence[int]) -> None:
        """Cancel requests before the next step; ids of finished requests have no effect."""
        known = [request_id for request_id in ids if request_id in self._running]
        for request_id in known:
            del self._running[request_id]
        if known:
            self._post(lambda: self._cancel(known))

    async def close(self) -> None:
        """Stop the thread after its current step; all requests end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command for the thread; return False if the worker is closed."""
        with self._changed:
            if not self._closing:
                self._commands.append(command)
                self._changed.notify()
            return not self._closing

    # Methods of the thread.

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._commands or self._closing or not self._engine.idle)
                    if self._closing:
                        break
                self._run_commands()
                if not self._engine.idle and (events := self._step()):
                    self._call(self._dispatch, events)
        finally:
            # Whatever ended the thread, end the requests that still wait for events.
            with self._changed:
                self._closing = True
            self._run_commands()
            self._engine.abandon()
            self._call(self._dispatch, [Finished(request_id, "cancelled", None, 0) for request_id in self._alive])

    def _run_commands(self) -> None:
        with self._changed:
            commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _step(self) -> list[Event]:
        try:
            events = self._engine.step()
        except Exception as error:
            _LOG.exception("a step of the engine failed; all of its requests end")
            events = [Finished(request_id, "error", type(error).__name__, 0) for request_id in self._alive]
            # The cause of the failure may persist, so the engine drops all requests.
            self._engine.abandon()
        self._alive -= {event.request_id for event in events if isinstance(event, Finished)}
        return events

    def _submit(self, requests: Sequence[Request], ids: list[int], settle: Callable[..., None]) -> None:
        try:
            for request in requests:
                ids.append(self._engine.submit(request))
        except Exception as error:
            self._cancel(ids)
            self._call(settle, error)
        else:
            self._alive.update(ids)
            self._call(settle, None)

    def _cancel(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            self._engine.cancel(request_id)
        self._alive.difference_update(ids)

    def _call(self, function: Callable[..., None], argument: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    def _dispatch(self, events: list[Event]) -> None:
        """Give events to their answers, on the event loop."""
        now = time.monotonic()
        for event in events:
            take = self._running.pop if isinstance(event, Finished) else self._running.get
            if (answer := take(event.request_id, None)) is not None:
                answer.put(event, now)


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

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
