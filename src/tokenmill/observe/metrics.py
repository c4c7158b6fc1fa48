"""Prometheus metrics, under vLLM's names where the meaning is the same. Times are seconds.

They are plain numbers until they are asked for: one thread counts, several times per token.
"""

from __future__ import annotations

import collections
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tokenmill.core.messages import EngineInfo, Stats
from tokenmill.core.types import Speculation
from tokenmill.observe.kv_cache import GB, kv_cache_stats

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class Metrics(Collector):
    """The metrics of one served model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._first_token = _Histogram(_FIRST_TOKEN)
        self._between_tokens = _Histogram(_BETWEEN_TOKENS)
        self._request = _Histogram(_REQUEST)
        self._queue = _Histogram(_REQUEST)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._ended: collections.Counter[str] = collections.Counter()
        self._engine: tuple[EngineInfo, Stats] | None = None
        self._engine_up = False
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

    def render(self, engine: tuple[EngineInfo, Stats] | None, engine_up: bool) -> bytes:
        """The exposition text. `engine`: what it is and the counters last heard of it, None before the first."""
        self._engine, self._engine_up = engine, engine_up
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls for the text."""
        yield self._gauge("engine_up", "Whether the engine is there and answers.", float(self._engine_up))
        if self._engine is not None:
            info, stats = self._engine
            yield from self._of_engine(stats)
            if self._engine_up:
                yield from self._of_cache(kv_cache_stats(info, stats))
            yield from self._of_budgets(stats)
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

    def _of_engine(self, stats: Stats) -> Iterator[Metric]:
        """The engine's own counters. They start again with a new engine process, as Prometheus expects of a restart."""
        # What ran in an engine that is gone runs no more.
        running, waiting, held = (stats.running, stats.waiting, stats.kv_held) if self._engine_up else (0, 0, 0)
        yield self._gauge("num_requests_running", "Sequences in the running batch.", running)
        yield self._gauge("num_requests_waiting", "Sequences waiting for their turn.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool that running sequences hold, 0 to 1.", held / max(1, stats.kv_total))
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix tree.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix tree.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Sequences that lost their KV to others and are computed again.", stats.preemptions)
        yield self._counter("kv_cache_evictions", "Frames that the prefix tree gave up.", stats.evictions)
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)
        if stats.speculation is not None:
            yield from self._of_speculation(stats.speculation)

    def _of_speculation(self, total: Speculation) -> Iterator[Metric]:
        yield self._counter("spec_decode_num_drafts", "Drafts that were verified.", total.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens of these drafts.", sum(total.drafted))
        yield self._counter("spec_decode_num_accepted_tokens", "Tokens of these drafts that were right.", sum(total.accepted))
        by_position = CounterMetricFamily(
            "tokenmill:spec_decode_num_accepted_tokens_per_pos",
            "Tokens of these drafts that were right, by position in the draft.",
            labels=("model_name", "position"),
        )
        for position, accepted in enumerate(total.accepted):
            by_position.add_metric((self._model, str(position)), accepted)
        yield by_position

    def _of_cache(self, cache: dict[str, Any]) -> Iterator[Metric]:
        """What the KV cache holds now; nothing once its engine is gone."""
        states = ("free", "used", "cached")
        yield self._gauges("kv_cache_frames", "Frames of 8 tokens by state.", ("state",), {(s,): cache[f"{s}_frames"] for s in states})
        yield self._gauge("kv_cache_shared_frames", "Used frames that several sequences hold.", cache["shared_frames"])
        pages = cache["pages_by_size"].items()
        yield self._gauges(
            "kv_cache_pages",
            "Pages by state and tokens.",
            ("state", "page_size"),
            {(state, str(size)): counts[state] for size, counts in pages for state in states},
        )
        yield self._gauges(
            "kv_cache_shared_pages",
            "Used pages of which several sequences hold a frame, by tokens.",
            ("page_size",),
            {(str(size),): counts["shared"] for size, counts in pages},
        )
        yield self._gauges(
            "kv_cache_bytes_per_token",
            "Of one position in all layers, by format.",
            ("format",),
            {(name,): of_format["per_token"] for name, of_format in cache["bytes_by_format"].items()},
        )
        yield self._gauges(
            "kv_cache_saved_bytes",
            "What sharing and compression save now.",
            ("by",),
            {(by,): cache[f"saved_by_{by}_gb"] * GB for by in ("sharing", "compression")},
        )
        yield self._gauge("kv_cache_fragmentation", "Share of held positions with nothing computed, 0 to 1.", cache["fragmentation"])

    def _of_budgets(self, stats: Stats) -> Iterator[Metric]:
        """What KV budgets have made happen."""
        yield self._counter("kv_budget_sparsified", "Sequences that began to drop KV frames for their budget.", stats.kv_sparsified)
        yield self._counter("kv_budget_dropped_frames", "Frames that sequences gave up for their budget.", stats.kv_dropped)
        yield self._counter("kv_budget_ended", "Sequences that ended because their budget was used up.", stats.kv_ended)
        yield self._counter("kv_budget_refused", "Requests refused because their prompt exceeds their budget.", stats.kv_refused)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        return self._gauges(name, about, (), {(): value})

    def _gauges(self, name: str, about: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
        """values: by the labels' values."""
        family = GaugeMetricFamily(f"tokenmill:{name}", about, labels=("model_name", *labels))
        for of_labels, value in values.items():
            family.add_metric((self._model, *of_labels), value)
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
