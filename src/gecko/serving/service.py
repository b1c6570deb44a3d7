"""Validate a request, prepare it and submit it to the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gecko.inference.request import QueueFullError
from gecko.inference.text import Piece
from gecko.serving.answer import Answer, ChatReply, CompletionReply, Reply, Usage, encode_answer
from gecko.serving.bodies import Body, RequestMemory
from gecko.serving.limits import Admission, ApiError, Limits
from gecko.serving.metrics import Metrics
from gecko.serving.prepare import Preparation, SavedStates, ServedModel, Threads, num_choices
from gecko.serving.protocol import ChatRequest, CompletionRequest
from gecko.serving.worker import RequestGroup, Worker, WorkerClosedError


@dataclass(frozen=True)
class StartedRequest:
    """A request that the engine has accepted; the caller must close ``answer``."""

    answer: Answer
    reply: CompletionReply | ChatReply
    """Format of the answer."""
    stream: bool
    include_usage: bool


class Service:
    """Entry point of requests, for the event loop."""

    def __init__(
        self, model: ServedModel, worker: Worker, metrics: Metrics, limits: Limits, states: SavedStates
    ) -> None:
        self.model, self.worker, self.metrics, self.limits, self.states = model, worker, metrics, limits, states
        self.admission, self.memory = Admission(limits), RequestMemory(limits.memory_bytes)
        self.threads, self._preparation = Threads(), Preparation(model, limits, states)

    async def begin(self, kind: type[CompletionRequest] | type[ChatRequest], body: Body) -> StartedRequest:
        """Submit the request in ``body`` to the engine.

        Raises:
            ApiError: the request is invalid, or the server has no capacity for it now.
        """
        arrival = time.monotonic()
        places = _Places(self.admission)
        try:
            return await self._begin(kind, body, places, arrival)
        except BaseException as error:
            places.release()
            api_error = _to_api_error(error)
            if api_error is None:
                raise
            raise api_error from error

    async def _begin(
        self, kind: type[CompletionRequest] | type[ChatRequest], body: Body, places: _Places, arrival: float
    ) -> StartedRequest:
        # Take one place before any work, and the rest when the number of choices is known.
        places.take(1)
        size = len(body)
        asked = await self.threads.run(size, self._preparation.parse, kind, body.take)
        places.take(num_choices(asked))
        stream, include_usage = asked.stream, asked.include_usage
        prepared = await self.threads.run(size, self._preparation.prepare, asked)
        body.resize(prepared.num_bytes)
        running: RequestGroup = await self.worker.submit(prepared.requests, arrival, arrival + self.limits.seconds)
        answer = Answer(running, prepared.choices, self.metrics, prepared.usage, places.release)
        return StartedRequest(answer, prepared.reply, stream, include_usage)

    async def encode(self, reply: Reply, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """Encode an answer that is not streamed, outside the event loop: with log-probabilities it may be large."""
        return await self.threads.encode(lambda: encode_answer(reply.whole(pieces, usage)))


class _Places:
    """Places of one request in the queue."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._taken = admission, 0

    def take(self, places: int) -> None:
        """Hold ``places`` in total; on ApiError, the number held is unchanged."""
        self._admission.take(places - self._taken, places)
        self._taken = places

    def release(self) -> None:
        self._admission.release(self._taken)
        self._taken = 0


def _to_api_error(error: BaseException) -> ApiError | None:
    """Convert an error of the engine or of preparation to an answer; None for any other error."""
    if isinstance(error, ValueError | TypeError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, WorkerClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    return None
