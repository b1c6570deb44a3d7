"""Errors in the format of OpenAI's API, the limit for requests in progress, and metrics for Prometheus."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.scheduler import Engine
from gecko.serving.options import Limits

RETRY_AFTER = "2"
"""Seconds after which a refused client should retry."""
_LONGEST_NAME = 100
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_REQUEST_ID = b"x-request-id"
_BETWEEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ApiError(Exception):
    """Error that is answered with HTTP ``status``. The message states the rule and the value given, ``code`` is for
    programs, ``param`` is the wrong field; with ``close`` the connection ends after the answer."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, close: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.close = status, code, param, close

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # Quoted parts of a request may contain lone surrogates, which UTF-8 cannot encode.
        message, param = (text and text.encode(errors="backslashreplace").decode() for text in (str(self), self.param))
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": RETRY_AFTER} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.close:
            headers["Connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


def invalid(param: str | None, message: str) -> ApiError:
    """Return the error for a request whose field ``param`` has a wrong value."""
    return ApiError(400, message, code="invalid_value", param=param)


class ClientGoneError(Exception):
    """The client closed its connection."""


def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Convert any exception of a route to an error in this format."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, ClientGoneError):
        return ApiError(499, "the client closed the connection").response()
    if isinstance(error, HTTPException):
        asked = f"{request.method} {request.url.path}"[:_LONGEST_NAME]
        response = ApiError(error.status_code, f"{asked}: {error.detail}").response()
        response.headers.update(error.headers or {})
        return response
    return ApiError(500, "the server failed on this request; see its log").response()


HANDLERS = dict.fromkeys((ApiError, ClientGoneError, HTTPException, Exception), answer_error)


class Admission:
    """Counter of choices in progress, which refuses requests before any work is done."""

    def __init__(self, limits: Limits) -> None:
        self._places = limits.rows + limits.queue
        self.taken = 0
        self.draining = False
        """Whether the server is stopping and refuses new requests."""

    def take(self, held: ExitStack, places: int, of: int) -> None:
        """Take ``places`` more for a request, which then has ``of`` places in total, until ``held`` is closed. Raise
        ApiError 503 while draining, 429 if too few places are free, 400 if the server has fewer than ``of``."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; try another one, or later", code="shutting_down")
        if of > self._places:
            raise ApiError(400, f"a request must have at most {self._places} prompts × n; got {of}")
        if self.taken + places > self._places:
            raise ApiError(429, f"all {self._places} places of the queue are taken; try later", code="queue_full")

        def release() -> None:
            self.taken -= places

        self.taken += places
        held.callback(release)


class Metrics(Collector):
    """Counts, times and gauges of one server, in the format of Prometheus; those of the engine are read on demand."""

    def __init__(self, engine: Engine, cache: PrefixCache | None) -> None:
        self._engine, self._cache, self._registry = engine, cache, CollectorRegistry()
        self._registry.register(self)
        self.first_token = Histogram(
            "gecko_time_to_first_token_seconds", "Time from the arrival of a request to its first token",
            buckets=_FIRST_TOKEN_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.between_tokens = Histogram(
            "gecko_time_between_tokens_seconds", "Time between two tokens of one continuation",
            buckets=_BETWEEN_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.finished = Counter(
            "gecko_continuations", "Finished continuations, by reason", ["reason"], registry=self._registry
        )
        self.responses = Counter("gecko_responses", "HTTP responses, by status", ["status"], registry=self._registry)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engine, cache = self._engine, self._cache
        reused = "Prompt tokens not prefilled because of the prefix cache or a shared prompt"
        yield GaugeMetricFamily("gecko_rows_active", "Requests in prefill or decoding", engine.active)
        yield GaugeMetricFamily("gecko_queue_length", "Requests waiting for a row", engine.queued)
        yield CounterMetricFamily("gecko_prompt_tokens", "Prompt tokens prefilled", engine.prompt_tokens_read)
        yield CounterMetricFamily("gecko_generated_tokens", "Generated tokens", engine.tokens_made)
        yield CounterMetricFamily("gecko_prefix_tokens_reused", reused, engine.prefix_tokens_reused)
        if cache is not None:
            yield CounterMetricFamily("gecko_prefix_cache_hits", "Prompts with a cached prefix", cache.hits)
            yield CounterMetricFamily("gecko_prefix_cache_misses", "Prompts without a cached prefix", cache.misses)
            yield GaugeMetricFamily("gecko_prefix_cache_bytes", "Memory of the cached states", cache.bytes)


def count_responses(app: ASGIApp, metrics: Metrics) -> ASGIApp:
    """Return ``app`` with responses that are counted by status and have the id of their request."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(_REQUEST_ID, b"")
        request_id = given if re.fullmatch(rb"[!-~]{1,128}", given) else uuid.uuid4().hex.encode()

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.responses.labels(message["status"]).inc()
                message = {**message, "headers": [*message.get("headers", ()), (_REQUEST_ID, request_id)]}
            await send(message)

        await app(scope, receive, send_counted)

    return counted
