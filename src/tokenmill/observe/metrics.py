"""Prometheus metrics, under vLLM's names where the meaning is the same. Times are seconds.

They are plain numbers until they are asked for: one thread counts, several times per token.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tokenmill.observe.engines import EngineStats, of_engines
from tokenmill.observe.histogram import BETWEEN_TOKENS, FIRST_TOKEN, REQUEST, Histogram
from tokenmill.observe.separation import PDMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(families: Iterable[Metric]) -> bytes:
    """The exposition text. Families of one name, of several models, are one there."""
    found: dict[str, Metric] = {}
    for family in families:
        first = found.setdefault(family.name, family)
        if first is not family:
            first.samples += family.samples
    return generate_latest(_Families(found.values()))


class _Families(Collector):
    """As prometheus_client asks for them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics:
    """The metrics of one served model. Those of engines have the engine's name as a label."""

    def __init__(self, model: str, requests: PDMetrics | None = None) -> None:
        """requests: what the dispatcher sees of them."""
        self._model = model
        self._requests = requests or PDMetrics()
        self._first_token = Histogram(FIRST_TOKEN)
        self._between_tokens = Histogram(BETWEEN_TOKENS)
        self._request = Histogram(REQUEST)
        self._queue = Histogram(REQUEST)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._ended: collections.Counter[str] = collections.Counter()

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

    def families(self, engines: Sequence[EngineStats], up: bool) -> Iterator[Metric]:
        """All there are, as they are now. up: a request sent now would be worked on."""
        yield self._gauge("engine_up", "Whether an engine is there that takes requests and answers.", float(up))
        yield from of_engines(self._model, engines)
        yield self._first_token.family("time_to_first_token_seconds", "From arrival to the first token of a choice.", self._model)
        yield self._between_tokens.family("inter_token_latency_seconds", "Between two outputs of a choice.", self._model)
        yield self._request.family("e2e_request_latency_seconds", "From arrival to the end of a choice.", self._model)
        yield self._queue.family("request_queue_time_seconds", "From arrival to the first step with the choice in it.", self._model)
        yield from self._requests.families(self._model)
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
