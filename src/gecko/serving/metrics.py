"""Metrics for Prometheus."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.scheduler import Engine

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_REQUEST_ID = b"x-request-id"
_BETWEEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counts, times and gauges of one server, in the format of Prometheus."""

    def __init__(self, engine: Engine, cache: PrefixCache | None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineNumbers(engine, cache))
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


class CountResponses:
    """ASGI middleware that counts the responses of ``app`` by status, and gives each the id of its request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(_REQUEST_ID, b"")
        request_id = given if re.fullmatch(rb"[!-~]{1,128}", given) else uuid.uuid4().hex.encode()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(message["status"]).inc()
                message = {**message, "headers": [*message.get("headers", ()), (_REQUEST_ID, request_id)]}
            await send(message)

        await self._app(scope, receive, counted)


class _EngineNumbers(Collector):
    """Collector that reads the counters of the engine and the cache on demand."""

    def __init__(self, engine: Engine, cache: PrefixCache | None) -> None:
        self._engine, self._cache = engine, cache

    def collect(self) -> Iterator[Metric]:
        engine, cache = self._engine, self._cache
        yield GaugeMetricFamily("gecko_rows_active", "Requests in prefill or decoding", engine.active)
        yield GaugeMetricFamily("gecko_queue_length", "Requests waiting for a row", engine.queued)
        yield CounterMetricFamily("gecko_prompt_tokens", "Prompt tokens prefilled", engine.prompt_tokens_read)
        yield CounterMetricFamily("gecko_generated_tokens", "Generated tokens", engine.tokens_made)
        yield CounterMetricFamily(
            "gecko_prefix_tokens_reused",
            "Prompt tokens not prefilled because of the prefix cache or a shared prompt",
            engine.prefix_tokens_reused,
        )
        if cache is not None:
            yield CounterMetricFamily("gecko_prefix_cache_hits", "Prompts with a cached prefix", cache.hits)
            yield CounterMetricFamily("gecko_prefix_cache_misses", "Prompts without a cached prefix", cache.misses)
            yield GaugeMetricFamily("gecko_prefix_cache_bytes", "Memory of the cached states", cache.bytes)
