"""What ``/metrics`` tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gecko.serving.engine import Engine
from gecko.serving.prefix_cache import PrefixCache

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BETWEEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """One server's numbers; ``page`` writes them."""

    def __init__(self, engine: Engine, cache: PrefixCache | None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineNumbers(engine, cache))
        self.first_token = Histogram(
            "gecko_time_to_first_token_seconds", "From a request's arrival to its first token",
            buckets=_FIRST_TOKEN_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.between_tokens = Histogram(
            "gecko_time_between_tokens_seconds", "Between two tokens of one continuation",
            buckets=_BETWEEN_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.finished = Counter(
            "gecko_continuations", "Continuations that ended, by reason", ["reason"], registry=self._registry
        )
        self.responses = Counter("gecko_responses", "HTTP answers, by status", ["status"], registry=self._registry)

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class CountResponses:
    """Counts every HTTP answer of ``app`` in ``metrics.responses``."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counted)


class _EngineNumbers(Collector):
    """Read when they are asked for; the engine counts anyway."""

    def __init__(self, engine: Engine, cache: PrefixCache | None) -> None:
        self._engine, self._cache = engine, cache

    def collect(self) -> Iterator[Metric]:
        engine, cache = self._engine, self._cache
        yield GaugeMetricFamily("gecko_rows_active", "Texts that are read or continued now", engine.active)
        yield GaugeMetricFamily("gecko_queue_length", "Requests that wait for a row", engine.queued)
        yield CounterMetricFamily("gecko_prompt_tokens", "Prompt tokens read", engine.prompt_tokens_read)
        yield CounterMetricFamily("gecko_generated_tokens", "Tokens made", engine.tokens_made)
        yield CounterMetricFamily(
            "gecko_prefix_tokens_reused", "Prompt tokens that did not have to be read", engine.prefix_tokens_reused
        )
        if cache is not None:
            yield CounterMetricFamily("gecko_prefix_cache_hits", "Prompts with a known start", cache.hits)
            yield CounterMetricFamily("gecko_prefix_cache_misses", "Prompts without", cache.misses)
            yield GaugeMetricFamily("gecko_prefix_cache_bytes", "Memory of the cached states", cache.bytes)
