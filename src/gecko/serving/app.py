"""HTTP routes of the server, and the service behind them: validate a request, prepare it, submit it to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any, ParamSpec, TypeVar

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from gecko.inference.request import QueueFullError
from gecko.inference.text import Piece
from gecko.records import FieldError
from gecko.runtime.process import __version__
from gecko.serving.answer import Answer, EventStream, slices, unless_gone
from gecko.serving.bodies import BODY, Body, ReadBodies, RequestMemory
from gecko.serving.chat_requests import ChatRequest, DetokenizeRequest, ResponseRequest, TokenizeRequest
from gecko.serving.connection import Gate, Hosts
from gecko.serving.fields import describe
from gecko.serving.limits import HANDLERS, Admission, ApiError, invalid
from gecko.serving.metrics import CountResponses, Metrics
from gecko.serving.options import Limits
from gecko.serving.prepare import Preparation, ServedModel
from gecko.serving.protocol import CompletionRequest, GenerationRequest, SaveState
from gecko.serving.replies import Reply, StateReply, encode_answer, encode_event
from gecko.serving.stores import ResponseStore, SavedStates, response_not_found
from gecko.serving.worker import Worker, WorkerClosedError

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ENGINE_REQUESTS: Mapping[str, type[GenerationRequest | SaveState]] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponseRequest,
    "/v1/states": SaveState,
}  # fmt: skip
"""Routes to the engine, and the records of their bodies."""
_BODIES: Mapping[str, type] = {**_ENGINE_REQUESTS, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
"""Routes that take a body."""
_SMALL = 1 << 16
"""Maximum size in bytes of a body that is prepared in milliseconds, whatever its content."""
P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Thread pools for work that would block the event loop.

    Large requests are prepared one at a time, small requests in parallel to them. Answers are encoded one at a time.
    """

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(1, "gecko-large")
        self._small = ThreadPoolExecutor(2, "gecko-small")
        self._answers = ThreadPoolExecutor(1, "gecko-answers")

    async def run(self, size: int, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run ``function`` for a body of ``size`` bytes and return its result."""
        threads = self._small if size <= _SMALL else self._large
        return await asyncio.wrap_future(threads.submit(function, *arguments, **options))

    async def encode(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run ``function``, which encodes an answer, and return its result."""
        return await asyncio.wrap_future(self._answers.submit(function, *arguments, **options))

    def close(self) -> None:
        for threads in (self._large, self._small, self._answers):
            threads.shutdown(wait=False, cancel_futures=True)


class Service:
    """Entry point of requests, for the event loop."""

    def __init__(
        self, model: ServedModel, worker: Worker, metrics: Metrics, limits: Limits, states: SavedStates,
        responses: ResponseStore,
    ) -> None:  # fmt: skip
        self.model, self.worker, self.metrics, self.limits, self.states = model, worker, metrics, limits, states
        self.responses = responses
        self.admission, self.memory = Admission(limits), RequestMemory(limits.memory_bytes)
        self.threads, self._preparation = Threads(), Preparation(model, limits, states, responses)

    async def start(self, path: str, body: Body) -> Answer:
        """Parse and prepare the request in ``body`` and submit it to the engine; the caller must close the answer.
        Raise ApiError if the request is invalid, or the server has no capacity for it now."""
        places = ExitStack()
        try:
            return await self._start(_ENGINE_REQUESTS[path], body, places)
        except BaseException as error:
            places.close()
            api_error = _to_api_error(error)
            if api_error is None:
                raise
            raise api_error from error

    async def _start(self, kind: type[GenerationRequest | SaveState], body: Body, places: ExitStack) -> Answer:
        # Take one place before any work, and the rest when the number of choices is known.
        self.admission.take(places, 1, 1)
        arrival, size = time.monotonic(), len(body)
        asked = await self.threads.run(size, self._preparation.parse, kind, body.take)
        self.admission.take(places, asked.num_choices - 1, asked.num_choices)
        # A constraint takes up to a second to compile.
        work = max(size, _SMALL + 1) if asked.constrained else size
        prepared = await self.threads.run(work, self._preparation.prepare, asked)
        body.resize(prepared.num_bytes)
        deadline = arrival + self.limits.seconds
        answer = Answer(prepared, self.worker.cancel, self.metrics, arrival, deadline, places.close)
        await self.worker.submit(prepared.requests, answer)
        return answer

    async def encode(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        """Encode an answer that is not streamed, outside the event loop: with log-probabilities it may be large."""

        def work() -> bytes:
            return encode_answer(answer.reply.whole(pieces, answer.usage)).encode()

        # A state is written to a disk, for which other answers do not wait.
        return await (asyncio.to_thread(work) if isinstance(answer.reply, StateReply) else self.threads.encode(work))

    async def encode_piece(self, reply: Reply, piece: Piece) -> list[bytes]:
        """Encode the events of a piece, outside the event loop if it has the log-probabilities of a prompt."""
        if piece.prompt is None:
            return list(map(encode_event, reply.events(piece)))
        return await self.threads.encode(lambda: [encode_event(event, encode_answer) for event in reply.events(piece)])

    async def tokens(self, path: str, body: Body) -> bytes:
        """Answer a request to ``/tokenize`` or ``/detokenize``. Raise ApiError if the request is invalid, or the answer
        takes too much memory."""
        try:
            work = self._preparation.tokenize if path == "/tokenize" else self._preparation.detokenize
            content = await self.threads.run(len(body), work, body.take)
        except ValueError as error:
            raise invalid(None, str(error)) from error
        body.resize(len(content))
        return content

    def describe_model(self) -> dict[str, Any]:
        """Return the entry of the model in ``/v1/models``."""
        return {
            "id": self.model.name, "object": "model", "created": 0, "owned_by": "gecko",
            "state_bytes": self.model.state_bytes, "states": self.states.names(),
            "saves_states": self.states.saves, "chat_template": self.model.chat.tuned,
        }  # fmt: skip


def _to_api_error(error: BaseException) -> ApiError | None:
    """Convert an error of the engine or of preparation to an answer; None for any other error."""
    if isinstance(error, ValueError | TypeError):
        return invalid(error.field if isinstance(error, FieldError) else None, str(error))
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
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.worker.close()
        service.threads.close()

    routes = [*_engine_routes(service), *_store_routes(service), *_operator_routes(service)]
    page = (files("gecko.serving") / "page" / "index.html").read_text(encoding="utf-8")
    document = cache(lambda: describe(routes, _BODIES, __version__))

    async def index(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_RULES})

    def openapi(request: Request) -> Response:  # in a thread: the document takes a moment
        return JSONResponse(document())

    undescribed = [Route("/", index), Route("/openapi.json", openapi)]
    app = Starlette(routes=[*routes, *undescribed], exception_handlers=HANDLERS, lifespan=lifespan)
    hosts = hosts or Hosts()
    open_to_pages = CORSMiddleware(
        Gate(ReadBodies(app, service.limits, service.memory, _BODIES), hosts, api_key),
        allow_origin_regex=hosts.origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",),
        expose_headers=("x-request-id",),
    )  # fmt: skip
    return CountResponses(open_to_pages, service.metrics)


def _engine_routes(service: Service) -> list[Route]:
    async def respond(request: Request) -> Response:
        answer = await unless_gone(request.receive, service.start(request.url.path, request.scope[BODY]))
        try:
            if answer.stream:
                # An error before the first piece is answered with its HTTP status.
                pieces = answer.pieces()
                first = await unless_gone(request.receive, anext(pieces))
                return EventStream(answer, _events(service, answer, first, pieces))
            whole = await unless_gone(request.receive, answer.whole())
            content = await unless_gone(request.receive, service.encode(answer, whole))
        except BaseException:
            answer.close()
            raise
        answer.close()
        return _json(content, answer.reply.status)

    async def count(request: Request) -> Response:
        return _json(await unless_gone(request.receive, service.tokens(request.url.path, request.scope[BODY])))

    return [
        Route(path, respond if path in _ENGINE_REQUESTS else count, methods=["POST"], name=path.rpartition("/")[2])
        for path in _BODIES
    ]


def _json(content: bytes, status: int = 200) -> Response:
    headers = {"Content-Length": str(len(content))}
    return StreamingResponse(slices(content), status, headers, media_type="application/json")


async def _events(service: Service, answer: Answer, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
    reply = answer.reply
    piece: Piece | None = first
    for event in reply.opening(answer.num_choices):
        yield encode_event(event)
    try:
        while piece is not None:
            for content in await service.encode_piece(reply, piece):
                yield content
            await asyncio.sleep(0)  # what waits is sent in turn with other answers
            piece = await anext(pieces, None)
    except ApiError as error:
        yield encode_event(reply.failed(error))
        return
    for event in reply.closing(answer.usage):
        yield encode_event(event)
    if reply.end:
        yield reply.end


def _store_routes(service: Service) -> list[Route]:
    states, responses = service.states, service.responses

    async def retrieve_response(request: Request) -> Response:
        return Response(responses.find(request.path_params["response_id"]).body, media_type="application/json")

    async def delete_response(request: Request) -> Response:
        name = request.path_params["response_id"]
        if not responses.delete(name):
            raise response_not_found(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def list_states(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await asyncio.to_thread(states.describe)})

    async def describe_state(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(states.position, request.path_params["name"]))

    async def delete_state(request: Request) -> Response:
        name = request.path_params["name"]
        await asyncio.to_thread(states.delete, name)
        return JSONResponse({"id": name, "object": "state", "deleted": True})

    return [
        Route("/v1/responses/{response_id}", retrieve_response),
        Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
        Route("/v1/states", list_states),
        Route("/v1/states/{name}", describe_state),
        Route("/v1/states/{name}", delete_state, methods=["DELETE"]),
    ]


def _operator_routes(service: Service) -> list[Route]:
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [await asyncio.to_thread(service.describe_model)]})

    async def model(request: Request) -> Response:
        service.model.check_name(request.path_params["name"])
        return JSONResponse(await asyncio.to_thread(service.describe_model))

    async def health(request: Request) -> Response:
        ready = service.worker.healthy and not service.admission.draining
        return JSONResponse({"status": "ok" if ready else "stopping"}, 200 if ready else 503)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.page(), media_type=METRICS_TYPE)

    return [
        Route("/v1/models", models), Route("/v1/models/{name:path}", model), Route("/health", health),
        Route("/version", version), Route("/metrics", metrics),
    ]  # fmt: skip
