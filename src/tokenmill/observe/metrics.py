"""Prometheus metrics, under vLLM's names where the meaning is the same. Times are seconds."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tokenmill.core.messages import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class Metrics:
    """The metrics of one served model, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._engine = _EngineCollector(model)
        self._registry.register(self._engine)
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token of a choice.", _FIRST_TOKEN)
        self._between_tokens = self._histogram("inter_token_latency_seconds", "Between two outputs of a choice.", _BETWEEN_TOKENS)
        self._request = self._histogram("e2e_request_latency_seconds", "From arrival to the end of a choice.", _REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step with the choice in it.", _REQUEST)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests whose prompt was computed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "tokenmill:request_success", "Choices that ended, by reason.", ("model_name", "finished_reason"), registry=self._registry
        )

    def prompt_computed(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    def first_output(self, since_arrival: float, queued: float) -> None:
        """The first token of a choice is there."""
        self._first_token.observe(since_arrival)
        self._queue.observe(max(0.0, queued))

    def next_output(self, since_last: float) -> None:
        self._between_tokens.observe(since_last)

    def generated(self, tokens: int) -> None:
        self._generation_tokens.inc(tokens)

    def choice_ended(self, reason: str, since_arrival: float) -> None:
        """`reason`: a finish reason, `abort` when the client went away, `error` when the engine failed."""
        self._success.labels(self._model, reason).inc()
        self._request.observe(since_arrival)

    def render(self, stats: Stats | None, engine_up: bool) -> bytes:
        """The exposition text. `stats`: the counters last heard of the engine, None before the first."""
        self._engine.stats, self._engine.up = stats, engine_up
        return generate_latest(self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tokenmill:{name}", about, ("model_name",), buckets=buckets, registry=self._registry).labels(self._model)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"tokenmill:{name}", about, ("model_name",), registry=self._registry).labels(self._model)


class _EngineCollector(Collector):
    """The engine's own counters. They start again with a new engine process, as Prometheus expects of a restart."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.stats: Stats | None = None
        self.up = False

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_up", "Whether the engine is there and answers.", float(self.up))
        stats = self.stats
        if stats is None:
            return
        # What ran in an engine that is gone runs no more.
        running, waiting, held = (stats.running, stats.waiting, stats.kv_held) if self.up else (0, 0, 0)
        yield self._gauge("num_requests_running", "Sequences in the running batch.", running)
        yield self._gauge("num_requests_waiting", "Sequences waiting for their turn.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool that running sequences hold, 0 to 1.", held / max(1, stats.kv_total))
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix tree.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix tree.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Sequences that lost their KV to others and are computed again.", stats.preemptions)
        yield self._counter("kv_cache_evictions", "Frames that the prefix tree gave up.", stats.evictions)
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tokenmill:{name}", about, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tokenmill:{name}", about, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
