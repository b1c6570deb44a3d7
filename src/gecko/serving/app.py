"""The HTTP routes."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gecko.serving import errors
from gecko.serving.answer import Answer
from gecko.serving.errors import ApiError, ClientGoneError
from gecko.serving.limits import LimitBodies
from gecko.serving.metrics import CountResponses
from gecko.serving.replies import Reply
from gecko.serving.schemas import ChatRequest, CompletionRequest
from gecko.serving.service import Asked, Service
from gecko.serving.text import Piece
from gecko.version import __version__

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SENDING_SECONDS = 5
"""For a stream to be sent to its end, once the time of its request is up."""
T = TypeVar("T")


def create_app(service: Service, api_key: str | None = None) -> ASGIApp:
    """The application; it starts and ends the service's worker.

    Args:
        api_key: what ``/v1/`` asks for as a bearer token; None: nothing.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.worker.close()

    # The pages that FastAPI draws of an API load scripts from elsewhere.
    app = FastAPI(title="Gecko", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    errors.install(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_operation(app, service)
    limited: ASGIApp = LimitBodies(app, service.limits)
    if api_key is not None:
        limited = RequireKey(limited, api_key)
    return CountResponses(limited, service.metrics)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        return await _respond(request, service, asked)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await _respond(request, service, asked)


def _add_models(app: FastAPI, service: Service) -> None:
    def describe() -> dict[str, Any]:
        model = service.model
        return {
            "id": model.name, "object": "model", "created": 0, "owned_by": "gecko",
            "state_bytes": model.state_bytes, "states": service.states.names(),
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [describe()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model.name:
            raise ApiError(404, f"the model here is {service.model.name!r}", code="model_not_found", param="model")
        return JSONResponse(describe())


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


async def _respond(request: Request, service: Service, asked: Asked) -> Response:
    answer = await _unless_gone(request.receive, service.begin(asked))
    try:
        reply: Reply = service.reply(asked)
        if asked.stream:
            # What goes wrong before the first piece still gets its status.
            pieces = answer.pieces()
            first = await _unless_gone(request.receive, anext(pieces))
            return EventStream(answer, _chunks(answer, reply, first, pieces, asked.include_usage))
        whole = await _unless_gone(request.receive, answer.whole())
    except BaseException:
        answer.close()
        raise
    answer.close()
    return JSONResponse(reply.whole(whole, answer.usage))


class EventStream(StreamingResponse):
    """Server-sent events of an answer, which is closed when they end or when the client goes away.

    So is the answer to a client that stays and does not read, soon after the time of its request.
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
            # The server closes the connection of a response that is left unfinished.
            pass
        finally:
            self._answer.close()


class RequireKey:
    """Lets requests to ``/v1/`` through that carry the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not secrets.compare_digest(given, self._expected):
                error = ApiError(
                    401, "the API key must be given as 'Authorization: Bearer KEY'", code="invalid_api_key"
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled with ClientGoneError if the client closes its connection first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
