"""HTTP routes of the server, and the service behind them: validate a request, prepare it, submit it to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeVar

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
from gecko.serving.answer import Answer, EventStream, Worker, WorkerClosedError, slices, unless_gone
from gecko.serving.bodies import Body, RequestMemory
from gecko.serving.chat_requests import ChatRequest, DetokenizeRequest, ResponseRequest, TokenizeRequest
from gecko.serving.connection import BODY, Hosts, guarded
from gecko.serving.fields import describe
from gecko.serving.limits import HANDLERS, Admission, ApiError, Metrics, count_responses, invalid
from gecko.serving.options import Limits
from gecko.serving.prepare import Preparation, ServedModel
from gecko.serving.protocol import CompletionRequest, GenerationRequest, SaveState
from gecko.serving.replies import StateReply, encode_answer, encode_event
from gecko.serving.stores import ResponseStore, SavedStates

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ENGINE_REQUESTS: Mapping[str, type[GenerationRequest | SaveState]] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponseRequest,
    "/v1/states": SaveState,
}  # fmt: skip
_BODIES: Mapping[str, type] = {**_ENGINE_REQUESTS, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
_SMALL = 1 << 16
"""Maximum size in bytes of a body that is prepared in milliseconds, whatever its content."""
T = TypeVar("T")


class Service:
    """Entry point of requests, for the event loop. What would block it runs in threads: large requests are prepared one
    at a time, small ones beside them, and answers are encoded one at a time."""

    def __init__(
        self, model: ServedModel, worker: Worker, metrics: Metrics, limits: Limits, states: SavedStates,
        responses: ResponseStore,
    ) -> None:  # fmt: skip
        self.model, self.worker, self.metrics, self.limits = model, worker, metrics, limits
        self.states, self.responses = states, responses
        self.admission, self.memory = Admission(limits), RequestMemory(limits.memory_bytes)
        self._preparation = Preparation(model, limits, states, responses)
        names = {"large": 1, "small": 2, "answers": 1}
        self._pools = {name: ThreadPoolExecutor(count, f"gecko-{name}") for name, count in names.items()}

    async def _run(self, pool: str, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._pools[pool].submit(function, *arguments))

    async def close(self) -> None:
        await self.worker.close()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    async def start(self, path: str, body: Body) -> Answer:
        """Parse and prepare the request in ``body`` and submit it to the engine; the caller must close the answer.
        Raise ApiError if the request is invalid, or the server has no capacity for it now."""
        places, arrival, pool = ExitStack(), time.monotonic(), "small" if len(body) <= _SMALL else "large"
        try:
            # Take one place before any work, and the rest when the number of choices is known.
            self.admission.take(places, 1, 1)
            asked = await self._run(pool, self._preparation.parse, _ENGINE_REQUESTS[path], body.take)
            self.admission.take(places, asked.num_choices - 1, asked.num_choices)
            # A constraint takes up to a second to compile.
            prepared = await self._run("large" if asked.constrained else pool, self._preparation.prepare, asked)
            body.resize(prepared.num_bytes)
            deadline = arrival + self.limits.seconds
            answer = Answer(prepared, self.worker.cancel, self.metrics, arrival, deadline, places.close)
            await self.worker.submit(prepared.requests, answer)
            return answer
        except BaseException as error:
            places.close()
            if isinstance(error, ValueError | TypeError):
                raise invalid(error.field if isinstance(error, FieldError) else None, str(error)) from error
            if isinstance(error, QueueFullError):
                raise ApiError(429, str(error), code="queue_full") from error
            if isinstance(error, WorkerClosedError):
                raise ApiError(503, "the server is shutting down", code="shutting_down") from error
            raise

    async def whole(self, answer: Answer) -> bytes:
        """Return an answer that is not streamed; with log-probabilities it may be large."""
        pieces = await answer.whole()

        def work() -> bytes:
            return encode_answer(answer.reply.whole(pieces, answer.usage)).encode()

        # A state is written to a disk, for which other answers do not wait.
        return await (asyncio.to_thread(work) if isinstance(answer.reply, StateReply) else self._run("answers", work))

    async def events(self, answer: Answer, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        reply = answer.reply
        piece: Piece | None = first
        for event in reply.opening(answer.num_choices):
            yield encode_event(event)
        try:
            while piece is not None:
                # The log-probabilities of a prompt may be many.
                large = piece.prompt is not None
                for content in await self._run("answers", reply.encode, piece) if large else reply.encode(piece):
                    yield content
                await asyncio.sleep(0)  # what waits is sent in turn with other answers
                piece = await anext(pieces, None)
        except ApiError as error:
            yield encode_event(reply.failed(error))
            return
        for closing in reply.closing(answer.usage):
            yield encode_event(closing)

    async def tokens(self, path: str, body: Body) -> bytes:
        """Answer a request to ``/tokenize`` or ``/detokenize``. Raise ApiError if the request is invalid, or the answer
        takes too much memory."""
        work = self._preparation.tokenize if path == "/tokenize" else self._preparation.detokenize
        try:
            content = await self._run("small" if len(body) <= _SMALL else "large", work, body.take)
        except ValueError as error:
            raise invalid(None, str(error)) from error
        body.resize(len(content))
        return content

    def describe_model(self) -> dict[str, Any]:
        """Return the entry of the model in ``/v1/models``."""
        return {
            "id": self.model.name, "object": "model", "created": 0, "owned_by": "gecko",
            "state_bytes": self.model.state_bytes, "states": [one["id"] for one in self.states.describe_all()],
            "saves_states": self.states.saves, "chat_template": self.model.chat.tuned,
        }  # fmt: skip


def create_app(service: Service, api_key: str | None = None, hosts: Hosts | None = None) -> ASGIApp:
    """Create the ASGI application, which starts and closes the worker of the service. Clients must send ``api_key``, if
    it is given, and may use the names ``hosts``; None: those of a local server."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.close()

    page = (files("gecko.serving") / "page" / "index.html").read_text(encoding="utf-8")
    routes = [*_engine_routes(service), *_other_routes(service)]
    document = cache(lambda: describe(routes, _BODIES, __version__))

    async def index(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_RULES})

    def openapi(request: Request) -> Response:  # in a thread: the document takes a moment
        return JSONResponse(document())

    undescribed = [Route("/", index), Route("/openapi.json", openapi)]
    app = Starlette(routes=[*routes, *undescribed], exception_handlers=HANDLERS, lifespan=lifespan)
    hosts = hosts or Hosts()
    open_to_pages = CORSMiddleware(
        guarded(app, service.limits, service.memory, _BODIES.keys(), hosts, api_key),
        allow_origin_regex=hosts.origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",),
        expose_headers=("x-request-id",),
    )  # fmt: skip
    return count_responses(open_to_pages, service.metrics)


def _engine_routes(service: Service) -> list[Route]:
    """Return the routes with a body."""

    async def respond(request: Request) -> Response:
        answer = await unless_gone(request.receive, service.start(request.url.path, request.scope[BODY]))
        try:
            if answer.stream:
                # An error before the first piece is answered with its HTTP status.
                pieces = answer.pieces()
                first = await unless_gone(request.receive, anext(pieces))
                return EventStream(answer, service.events(answer, first, pieces))
            content = await unless_gone(request.receive, service.whole(answer))
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


def _other_routes(service: Service) -> list[Route]:
    """Return the routes without a body. What they call in a thread may read or write files."""
    states, responses = service.states, service.responses

    def delete(kind: str, store: SavedStates | ResponseStore, name: str) -> dict[str, Any]:
        store.delete(name)
        return {"id": name, "object": kind, "deleted": True}

    def model(name: str) -> dict[str, Any]:
        service.model.check_name(name)
        return service.describe_model()

    def route(method: str, path: str, name: str, work: Callable[..., Any]) -> Route:
        async def respond(request: Request) -> Response:
            found = await asyncio.to_thread(work, *request.path_params.values())
            is_json = isinstance(found, bytes)
            return Response(found, media_type="application/json") if is_json else JSONResponse(found)

        return Route(path, respond, methods=[method], name=name)

    async def health(request: Request) -> Response:
        ready = service.worker.healthy and not service.admission.draining
        return JSONResponse({"status": "ok" if ready else "stopping"}, 200 if ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.page(), media_type=METRICS_TYPE)

    return [
        route("GET", "/v1/responses/{response_id}", "retrieve_response", lambda name: responses.find(name).body),
        route("DELETE", "/v1/responses/{response_id}", "delete_response", partial(delete, "response", responses)),
        route("GET", "/v1/states", "list_states", lambda: {"object": "list", "data": states.describe_all()}),
        route("GET", "/v1/states/{name}", "describe_state", states.describe),
        route("DELETE", "/v1/states/{name}", "delete_state", partial(delete, "state", states)),
        route("GET", "/v1/models", "models", lambda: {"object": "list", "data": [service.describe_model()]}),
        route("GET", "/v1/models/{name:path}", "model", model),
        route("GET", "/version", "version", lambda: {"version": __version__}),
        Route("/health", health), Route("/metrics", metrics),
    ]  # fmt: skip
