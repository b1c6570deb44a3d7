"""HTTP routes of the server, and the service behind them: validate a request, prepare it, submit it to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gecko.inference.request import QueueFullError
from gecko.inference.text import Piece
from gecko.runtime.process import __version__
from gecko.serving import limits as errors
from gecko.serving.answer import Answer, ChatReply, CompletionReply, Reply, Usage, encode_answer
from gecko.serving.bodies import BODY, Body, ReadBodies, RequestMemory
from gecko.serving.connection import Gate, Hosts
from gecko.serving.limits import Admission, ApiError, Limits
from gecko.serving.metrics import CountResponses, Metrics
from gecko.serving.prepare import (
    LARGE,
    Asked,
    Preparation,
    Prepared,
    ServedModel,
    Threads,
    num_choices,
)
from gecko.serving.protocol import ChatRequest, CompletionRequest
from gecko.serving.responses.fields import ResponseRequest
from gecko.serving.responses.routes import PATH as RESPONSES
from gecko.serving.responses.routes import ResponsePreparation, add_responses
from gecko.serving.responses.store import ResponseStore
from gecko.serving.sending import EventStream, encode_event, slices, unless_gone
from gecko.serving.states.files import SavedStates
from gecko.serving.states.routes import PATH as STATES
from gecko.serving.states.routes import add_states
from gecko.serving.tokens import DETOKENIZE, TOKENIZE, TokenRoutes
from gecko.serving.worker import RequestGroup, Worker, WorkerClosedError

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REQUEST_TYPES: Mapping[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest,
}  # fmt: skip
"""Routes that take a body, and the model that validates it."""
A = TypeVar("A", bound=Asked)
B = TypeVar("B", bound=Prepared)


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
        self, model: ServedModel, worker: Worker, metrics: Metrics, limits: Limits, states: SavedStates,
        responses: ResponseStore,
    ) -> None:  # fmt: skip
        self.model, self.worker, self.metrics, self.limits, self.states = model, worker, metrics, limits, states
        self.responses = responses
        self.admission, self.memory = Admission(limits), RequestMemory(limits.memory_bytes)
        self.threads, self._preparation = Threads(), Preparation(model, limits, states)
        self.response_preparation = ResponsePreparation(model, limits, self._preparation, responses)
        tokens = TokenRoutes(model, limits)
        self._token_work = {TOKENIZE: tokens.tokenize, DETOKENIZE: tokens.detokenize}

    async def begin(self, kind: type[CompletionRequest] | type[ChatRequest], body: Body) -> StartedRequest:
        """Submit the request in ``body`` to the engine; errors as for ``start``."""
        parse = partial(self._preparation.parse, kind)
        asked, prepared, answer = await self.start(body, parse, self._preparation.prepare)
        return StartedRequest(answer, prepared.reply, asked.stream, asked.include_usage)

    async def start(
        self, body: Body, parse: Callable[[Callable[[], bytearray]], A], prepare: Callable[[A], B]
    ) -> tuple[A, B, Answer]:
        """Parse and prepare the request in ``body`` and submit it to the engine; the caller must close the answer.

        Raises:
            ApiError: the request is invalid, or the server has no capacity for it now.
        """
        arrival = time.monotonic()
        places = _Places(self.admission)
        try:
            return await self._start(body, parse, prepare, places, arrival)
        except BaseException as error:
            places.release()
            api_error = _to_api_error(error)
            if api_error is None:
                raise
            raise api_error from error

    async def _start(
        self, body: Body, parse: Callable[[Callable[[], bytearray]], A], prepare: Callable[[A], B], places: _Places,
        arrival: float,
    ) -> tuple[A, B, Answer]:  # fmt: skip
        # Take one place before any work, and the rest when the number of choices is known.
        places.take(1)
        size = len(body)
        asked = await self.threads.run(size, parse, body.take)
        places.take(num_choices(asked))
        work = max(size, LARGE) if asked.constrained else size
        prepared = await self.threads.run(work, prepare, asked)
        body.resize(prepared.num_bytes)
        running: RequestGroup = await self.worker.submit(prepared.requests, arrival, arrival + self.limits.seconds)
        return asked, prepared, Answer(running, prepared.choices, self.metrics, prepared.usage, places.release)

    async def encode(self, reply: Reply, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """Encode an answer that is not streamed, outside the event loop: with log-probabilities it may be large."""
        return await self.threads.encode(lambda: encode_answer(reply.whole(pieces, usage)))

    async def encode_chunk(self, reply: Reply, piece: Piece) -> bytes:
        """Encode a piece of a stream, outside the event loop if it has the log-probabilities of a prompt."""
        if piece.prompt is None:
            return encode_event(reply.chunk(piece))
        return await self.threads.encode(lambda: b"data: " + encode_answer(reply.chunk(piece)) + b"\n\n")

    async def tokens(self, path: str, body: Body) -> bytes:
        """Answer a request to ``/tokenize`` or ``/detokenize``.

        Raises:
            ApiError: the request is invalid, or the answer takes too much memory.
        """
        try:
            content = await self.threads.run(len(body), self._token_work[path], body.take)
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        body.resize(len(content))
        return content


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
    add_responses(app, service)
    add_states(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    _add_operation(app, service)
    paths = (*_REQUEST_TYPES, RESPONSES, STATES, TOKENIZE, DETOKENIZE)
    reading = ReadBodies(app, service.limits, service.memory, paths)
    hosts = hosts or Hosts()
    open_to_pages = CORSMiddleware(
        Gate(reading, hosts, api_key), allow_origin_regex=hosts.origins, allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",), expose_headers=("x-request-id",),
    )  # fmt: skip
    return CountResponses(open_to_pages, service.metrics)


def _add_generation(app: FastAPI, service: Service) -> None:
    """Add the routes for generation. They take no body from FastAPI, which would validate it on the event loop."""

    async def respond(request: Request) -> Response:
        return await _respond(request, service, _REQUEST_TYPES[request.url.path])

    kinds = {**_REQUEST_TYPES, RESPONSES: ResponseRequest}
    names, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds.values()], ref_template="#/components/schemas/{model}"
    )
    for path in _REQUEST_TYPES:
        app.post(path)(respond)
    describe = app.openapi

    def describe_all() -> dict[str, Any]:
        described = describe()
        described.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, kind in kinds.items():
            content = {"application/json": {"schema": names[kind, "validation"]}}
            described["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        return described

    app.openapi = describe_all  # type: ignore[method-assign]


def _add_tokens(app: FastAPI, service: Service) -> None:
    async def respond(request: Request) -> Response:
        work = service.tokens(request.url.path, request.scope[BODY])
        return _json(await unless_gone(request.receive, work))

    for path in (TOKENIZE, DETOKENIZE):
        app.post(path)(respond)


def _add_models(app: FastAPI, service: Service) -> None:
    def describe() -> dict[str, Any]:
        model = service.model
        return {
            "id": model.name, "object": "model", "created": 0, "owned_by": "gecko",
            "state_bytes": model.state_bytes, "states": service.states.names(), "chat_template": model.chat.tuned,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [await asyncio.to_thread(describe)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.model.check_name(name)
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

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=METRICS_TYPE)


async def _respond(request: Request, service: Service, kind: type[CompletionRequest] | type[ChatRequest]) -> Response:
    started = await unless_gone(request.receive, service.begin(kind, request.scope[BODY]))
    answer, reply = started.answer, started.reply
    try:
        if started.stream:
            # An error before the first piece is answered with its HTTP status.
            pieces = answer.pieces()
            first = await unless_gone(request.receive, anext(pieces))
            return EventStream(answer, _chunks(service, answer, reply, first, pieces, started.include_usage))
        pieces_of_choices = await unless_gone(request.receive, answer.whole())
        content = await unless_gone(request.receive, service.encode(reply, pieces_of_choices, answer.usage))
    except BaseException:
        answer.close()
        raise
    answer.close()
    return _json(content)


def _json(content: bytes) -> Response:
    headers = {"Content-Length": str(len(content))}
    return StreamingResponse(slices(content), headers=headers, media_type="application/json")


async def _chunks(
    service: Service, answer: Answer, reply: Reply, first: Piece, pieces: AsyncIterator[Piece], usage: bool
) -> AsyncIterator[bytes]:
    for chunk in reply.opening(answer.num_choices):
        yield encode_event(chunk)
    yield await service.encode_chunk(reply, first)
    try:
        async for piece in pieces:
            yield await service.encode_chunk(reply, piece)
    except ApiError as error:
        yield encode_event(error.body)
        return
    if usage:
        yield encode_event(reply.usage_chunk(answer.usage))
    yield b"data: [DONE]\n\n"
