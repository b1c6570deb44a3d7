"""The engine on a thread of its own, and how the event loop talks to it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

from gecko.serving.engine import Engine
from gecko.serving.metrics import Metrics
from gecko.serving.request import Event, Finished, Request, Token

_LOG = logging.getLogger("gecko.serving")
Command = Callable[[], None]


class WorkerClosedError(RuntimeError):
    """The engine's thread takes no more requests."""


class Running:
    """Requests that were submitted together, as the event loop sees them; made by ``Worker.submit``."""

    def __init__(self, worker: Worker, ids: Sequence[int], begun: float, deadline: float) -> None:
        self._worker, self._begun, self.deadline = worker, begun, deadline
        self._indices = {request_id: index for index, request_id in enumerate(ids)}
        self._last: dict[int, float] = {}
        self._events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(deadline - time.monotonic(), self._events.put_nowait, None)

    async def next(self) -> tuple[int, Event] | None:
        """The next event and the index of its request; None once the time is up."""
        return await self._events.get()

    def cancel(self, index: int) -> None:
        """Free a request's place at once; no more of its events come."""
        self._worker.cancel([request_id for request_id, known in self._indices.items() if known == index])

    def close(self) -> None:
        """Free the places of all that are not finished."""
        self._alarm.cancel()
        self._worker.cancel(list(self._indices))

    def take(self, event: Event, now: float, metrics: Metrics) -> None:
        """Called by the worker, on the event loop, for each of its events."""
        if isinstance(event, Token):
            before = self._last.get(event.request_id)
            if before is None:
                metrics.first_token.observe(now - self._begun)
            else:
                metrics.between_tokens.observe(now - before)
            self._last[event.request_id] = now
            index = self._indices[event.request_id]
        else:
            index = self._indices.pop(event.request_id)
        self._events.put_nowait((index, event))

    def forget(self, request_id: int) -> None:
        """Called by the worker: this request was cancelled."""
        self._indices.pop(request_id, None)


class Worker:
    """Runs the engine's steps while there is something to do.

    All methods are for the event loop; only the thread touches the engine. What the loop wants is done
    between two steps, in order.
    """

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._commands: list[Command] = []
        self._closing = False
        self._changed = threading.Condition()
        self._running: dict[int, Running] = {}
        self._alive: set[int] = set()
        self._thread = threading.Thread(target=self._work, name="gecko-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Call it on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and not self._closing

    async def submit(self, requests: Sequence[Request], begun: float, deadline: float) -> Running:
        """Hand requests to the engine, all or none.

        Args:
            begun, deadline: in seconds of ``time.monotonic``; when the client asked, and until when events come.

        Raises:
            ValueError, TypeError, QueueFullError: the engine refuses one of them.
            WorkerClosedError: it is too late.
        """
        accepted: asyncio.Future[Running] = asyncio.get_running_loop().create_future()
        ids: list[int] = []  # the thread fills it

        def accept(ids: Sequence[int]) -> None:
            if not accepted.cancelled():
                running = Running(self, ids, begun, deadline)
                self._running.update(dict.fromkeys(ids, running))
                accepted.set_result(running)

        def refuse(error: Exception) -> None:
            if not accepted.cancelled():
                accepted.set_exception(error)

        if not self._post(lambda: self._submit(requests, ids, accept, refuse)):
            raise WorkerClosedError("the engine has stopped")
        try:
            return await accepted
        except asyncio.CancelledError:
            if accepted.cancelled():
                # At once: in the engine too, their room must be free before it takes what comes next.
                self._post(lambda: self._cancel(ids))
            elif accepted.exception() is None:
                # Both at once: the engine has taken them, and nobody wants them any more.
                accepted.result().close()
            raise

    def cancel(self, ids: Sequence[int]) -> None:
        """Free places before the next step; ids of finished requests have no effect."""
        known = [request_id for request_id in ids if request_id in self._running]
        for request_id in known:
            self._running.pop(request_id).forget(request_id)
        if known:
            self._post(lambda: self._cancel(known))

    async def close(self) -> None:
        """End all requests, and the thread with the step that it is at."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _post(self, command: Command) -> bool:
        """False if it will never be done."""
        with self._changed:
            if not self._closing:
                self._commands.append(command)
                self._changed.notify()
            return not self._closing

    # From here on: the thread.

    def _work(self) -> None:
        try:
            while self._wait():
                self._obey()
                if not self._engine.idle:
                    self._publish(self._step())
        finally:
            # However the thread ends, nobody is left waiting.
            with self._changed:
                self._closing = True
            self._obey()
            self._engine.abandon()
            self._publish([Finished(request_id, "cancelled", None, 0) for request_id in self._alive])

    def _wait(self) -> bool:
        """Until there is something to do; False when that is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closing or not self._engine.idle)
            return not self._closing

    def _obey(self) -> None:
        with self._changed:
            commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _step(self) -> list[Event]:
        try:
            events = self._engine.step()
        except Exception as error:
            _LOG.exception("the engine failed at a step; all requests in it end")
            events = [Finished(request_id, "error", type(error).__name__, 0) for request_id in self._alive]
            # Row by row it could fail again: what broke the step may still be there.
            self._engine.abandon()
        self._alive -= {event.request_id for event in events if isinstance(event, Finished)}
        return events

    def _submit(
        self, requests: Sequence[Request], ids: list[int], accept: Callable[[Sequence[int]], None],
        refuse: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        try:
            for request in requests:
                ids.append(self._engine.submit(request))
        except Exception as error:
            self._cancel(ids)
            self._call(refuse, error)
        else:
            self._alive.update(ids)
            self._call(accept, ids)

    def _cancel(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            self._engine.cancel(request_id)
        self._alive.difference_update(ids)

    def _publish(self, events: list[Event]) -> None:
        if events:
            self._call(self._dispatch, events)

    def _call(self, function: Callable[..., None], argument: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    # On the event loop again.

    def _dispatch(self, events: list[Event]) -> None:
        now = time.monotonic()
        for event in events:
            running = self._running.get(event.request_id)
            if running is None:
                continue
            if isinstance(event, Finished):
                del self._running[event.request_id]
            running.take(event, now, self._metrics)
