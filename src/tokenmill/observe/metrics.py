"""Prometheus metrics, under vLLM's names where the meaning is the same. Times are seconds.

They are plain numbers until they are asked for: one thread counts, several times per token.
"""

from __future__ import annotations

import collections
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tokenmill.observe.engines import EngineStats, families

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class Metrics(Collector):
    """The metrics of one served model. Those of engines have the engine's name as a label."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._first_token = _Histogram(_FIRST_TOKEN)
        self._between_tokens = _Histogram(_BETWEEN_TOKENS)
        self._request = _Histogram(_REQUEST)
        self._queue = _Histogram(_REQUEST)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._ended: collections.Counter[str] = collections.Counter()
        self._engines: Sequence[EngineStats] = ()
        self._up = False
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def prompt_computed(self, tokens: int) -> None:
        self._prompt_tokens += tokens

    def first_output(self, since_arrival: float, queued: float) -> None:
        """The first token of a choice is there."""
        self._first_token.observe(since_arrival)
        self._queue.observe(max(0.0, queued))

    def next_output(self, since_last: float) -> None:
        self._between_tokens.observe(since_last)

    def generated(self, tokens: int) -> None:
        self._generation_tokens += tokens

    def choice_ended(self, reason: str, since_arrival: float) -> None:
        """`reason`: a finish reason, `abort` when the client went away, `error` when the engine failed."""
        self._ended[reason] += 1
        self._request.observe(since_arrival)

    def render(self, engines: Sequence[EngineStats], up: bool) -> bytes:
        """The exposition text. up: a request sent now would be worked on."""
        self._engines, self._up = engines, up
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls for the text."""
        yield self._gauge("engine_up", "Whether an engine is there that takes requests and answers.", float(self._up))
        yield from families(self._model, self._engines)
        yield self._histogram("time_to_first_token_seconds", "From arrival to the first token of a choice.", self._first_token)
        yield self._histogram("inter_token_latency_seconds", "Between two outputs of a choice.", self._between_tokens)
        yield self._histogram("e2e_request_latency_seconds", "From arrival to the end of a choice.", self._request)
        yield self._histogram("request_queue_time_seconds", "From arrival to the first step with the choice in it.", self._queue)
        yield self._counter("prompt_tokens", "Prompt tokens of requests whose prompt was computed.", self._prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self._generation_tokens)
        ended = CounterMetricFamily("tokenmill:request_success", "Choices that ended, by reason.", labels=("model_name", "finished_reason"))
        for reason, count in self._ended.items():
            ended.add_metric((self._model, reason), count)
        yield ended

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tokenmill:{name}", about, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tokenmill:{name}", about, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _histogram(self, name: str, about: str, values: _Histogram) -> Metric:
        family = HistogramMetricFamily(f"tokenmill:{name}", about, labels=("model_name",))
        family.add_metric((self._model,), values.buckets(), values.sum)
        return family


class _Histogram:
    """Values counted by the first of `bounds` that they do not exceed, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound and how many values there are up to it."""
        return list(zip([*(str(float(bound)) for bound in self._bounds), "+Inf"], itertools.accumulate(self._counts), strict=True))
