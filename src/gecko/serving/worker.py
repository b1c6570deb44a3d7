"""Thread that runs the engine, and its interface to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

from gecko.inference.request import Event, Finished, Request
from gecko.inference.scheduler import Engine
from gecko.serving.answer import Answer

_LOG = logging.getLogger("gecko.serving")
Command = Callable[[], None]


class WorkerClosedError(RuntimeError):
    """The engine thread has stopped or is stopping."""


class Worker:
    """Thread that runs the steps of the engine while it has requests.

    The methods are for the event loop; only the thread accesses the engine. Commands of the event loop are executed in
    order between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: list[Command] = []
        self._closing = False
        self._changed = threading.Condition()
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

        def accept(ids: Sequence[int]) -> None:
            if not accepted.cancelled():
                answer.begin(ids)
                self._running.update(dict.fromkeys(ids, answer))
                accepted.set_result(None)

        def refuse(error: Exception) -> None:
            if not accepted.cancelled():
                accepted.set_exception(error)

        if not self._post(lambda: self._submit(requests, ids, accept, refuse)):
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

    def _post(self, command: Command) -> bool:
        """Queue a command for the thread; return False if the worker is closed."""
        with self._changed:
            if not self._closing:
                self._commands.append(command)
                self._changed.notify()
            return not self._closing

    # Methods of the thread.

    def _work(self) -> None:
        try:
            while self._wait():
                self._run_commands()
                if not self._engine.idle:
                    self._publish(self._step())
        finally:
            # Whatever ended the thread, end the requests that still wait for events.
            with self._changed:
                self._closing = True
            self._run_commands()
            self._engine.abandon()
            self._publish([Finished(request_id, "cancelled", None, 0) for request_id in self._alive])

    def _wait(self) -> bool:
        """Wait for work; return False when the worker is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closing or not self._engine.idle)
            return not self._closing

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

    # Called on the event loop.

    def _dispatch(self, events: list[Event]) -> None:
        now = time.monotonic()
        for event in events:
            answer = self._running.get(event.request_id)
            if answer is None:
                continue
            if isinstance(event, Finished):
                del self._running[event.request_id]
            answer.put(event, now)
