"""HTTP routes of the server, and the service behind them: validate a request, prepare it, submit it to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp, Receive, Scope, Send

from gecko.inference.request import QueueFullError
from gecko.inference.text import Piece
from gecko.runtime.process import __version__
from gecko.serving import limits as errors
from gecko.serving.answer import Answer, ChatReply, CompletionReply, Reply, Usage, encode_answer, encode_json
from gecko.serving.bodies import BODY, Body, ReadBodies, RequestMemory
from gecko.serving.connection import Gate, Hosts
from gecko.serving.limits import Admission, ApiError, ClientGoneError, Limits
from gecko.serving.metrics import CountResponses, Metrics
from gecko.serving.prepare import Preparation, SavedStates, ServedModel, Threads, num_choices
from gecko.serving.protocol import ChatRequest, CompletionRequest
from gecko.serving.worker import RequestGroup, Worker, WorkerClosedError

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SLICE_BYTES = 1 << 16
"""Maximum number of bytes of an answer that are handed to the connection at once."""
_SENDING_SECONDS = 5
"""Seconds to send the rest of a stream after the time limit of its request."""
_REQUEST_TYPES: Mapping[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest,
}  # fmt: skip
"""Routes that take a body, and the model that validates it."""
T = TypeVar("T")


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


def create_app(service: Service, api_key: str | None = None, hosts: Hosts | None = None) -> ASGIApp:
    """Create the ASGI application, which starts and closes the worker of the service.

    Args:
        api_key: bearer token required for ``/v1/``; None: no key.
        hosts: names that clients may use; None: the names of a local server.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.worker.close()
        service.threads.close()

    # The documentation pages of FastAPI load scripts from other sites.
    app = FastAPI(title="Gecko", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    errors.install(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_operation(app, service)
    reading = ReadBodies(app, service.limits, service.memory, _REQUEST_TYPES)
    return CountResponses(Gate(reading, Hosts() if hosts is None else hosts, api_key), service.metrics)


def _add_generation(app: FastAPI, service: Service) -> None:
    """Add the routes for generation. They take no body from FastAPI, which would validate it on the event loop."""

    async def respond(request: Request) -> Response:
        return await _respond(request, service, _REQUEST_TYPES[request.url.path])

    names, definitions = models_json_schema(
        [(kind, "validation") for kind in _REQUEST_TYPES.values()], ref_template="#/components/schemas/{model}"
    )
    for path, kind in _REQUEST_TYPES.items():
        content = {"application/json": {"schema": names[kind, "validation"]}}
        app.post(path, openapi_extra={"requestBody": {"required": True, "content": content}})(respond)
    describe = app.openapi

    def describe_all() -> dict[str, Any]:
        described = describe()
        described.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return described

    app.openapi = describe_all  # type: ignore[method-assign]


def _add_models(app: FastAPI, service: Service) -> None:
    def describe() -> dict[str, Any]:
        model = service.model
        return {
            "id": model.name, "object": "model", "created": 0, "owned_by": "gecko",
            "state_bytes": model.state_bytes, "states": service.states.names(),
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [await asyncio.to_thread(describe)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model.name:
            raise ApiError(
                404,
                f"the model must be {service.model.name!r}; got {name[:100]!r}",
                code="model_not_found",
                param="model",
            )
        return JSONResponse(await asyncio.to_thread(describe))


def _add_operation(app: FastAPI, service: Service) -> None:
    page = (files("gecko.serving") / "page" / "index.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_RULES})

    @app.get("/health")
    async def health() -> Response:
        ready = service.worker.healthy and not service.admission.draining
        return JSONResponse({"status": "ok" if ready else "stopping"}, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=METRICS_TYPE)


async def _respond(request: Request, service: Service, kind: type[CompletionRequest] | type[ChatRequest]) -> Response:
    started = await _unless_gone(request.receive, service.begin(kind, request.scope[BODY]))
    answer, reply = started.answer, started.reply
    try:
        if started.stream:
            # An error before the first piece is answered with its HTTP status.
            pieces = answer.pieces()
            first = await _unless_gone(request.receive, anext(pieces))
            return EventStream(answer, _chunks(answer, reply, first, pieces, started.include_usage))
        pieces_of_choices = await _unless_gone(request.receive, answer.whole())
        content = await _unless_gone(request.receive, service.encode(reply, pieces_of_choices, answer.usage))
    except BaseException:
        answer.close()
        raise
    answer.close()
    headers = {"Content-Length": str(len(content))}
    return StreamingResponse(_slices(content), headers=headers, media_type="application/json")


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
                await _unless_gone(receive, self.stream_response(send))
        except (ClientGoneError, TimeoutError):
            # uvicorn closes the connection of an unfinished response.
            pass
        finally:
            self._answer.close()


async def _slices(content: bytes) -> AsyncIterator[bytes]:
    """Yield ``content`` in slices, so that the memory of the request counts until the client has read its answer."""
    for begin in range(0, len(content), _SLICE_BYTES):
        yield content[begin : begin + _SLICE_BYTES]


async def _chunks(
    answer: Answer, reply: Reply, first: Piece, pieces: AsyncIterator[Piece], usage: bool
) -> AsyncIterator[bytes]:
    for chunk in reply.opening(answer.num_choices):
        yield _event(chunk)
    yield _event(reply.chunk(first))
    try:
        async for piece in pieces:
            yield _event(reply.chunk(piece))
    except ApiError as error:
        yield _event(error.body)
        return
    if usage:
        yield _event(reply.usage_chunk(answer.usage))
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {encode_json(data)}\n\n".encode()


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
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
