"""The metrics of engines: what each says of itself, under its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tokenmill.core.messages import EngineInfo, HandoverStats, Stats, StoreStats
from tokenmill.core.types import Speculation
from tokenmill.observe.kv_cache import GB, kv_cache_stats


class EngineStats(NamedTuple):
    """An engine by name, what it is, and the counters last heard of it. up: it is there and answers."""

    name: str
    info: EngineInfo
    stats: Stats
    up: bool


def of_engines(model: str, engines: Sequence[EngineStats]) -> Iterable[Metric]:
    """The metrics of all engines of a served model."""
    found: dict[str, Metric] = {}
    for engine in engines:
        _Engine(found, model, engine)
    return found.values()


class _Engine:
    """Adds one engine's samples to families, which are made for the first one."""

    def __init__(self, found: dict[str, Metric], model: str, engine: EngineStats) -> None:
        self._found = found
        self._labels = (model, engine.name)
        self._of_engine(engine.stats, engine.up)
        if engine.up:
            self._of_cache(kv_cache_stats(engine.info, engine.stats))
        self._of_budgets(engine.stats)
        if engine.stats.handover is not None:
            self._of_handovers(engine.stats.handover, engine.up)
        if engine.stats.store is not None:
            self._of_store(engine.stats.store, engine.up)

    def _of_engine(self, stats: Stats, up: bool) -> None:
        """The engine's own counters. They start again with a new engine process, as Prometheus expects of a restart."""
        # What ran in an engine that is gone runs no more.
        running, waiting, held = (stats.running, stats.waiting, stats.kv_held) if up else (0, 0, 0)
        self._gauge("num_requests_running", "Sequences in the running batch.", running)
        self._gauge("num_requests_waiting", "Sequences waiting for their turn.", waiting)
        self._gauge("kv_cache_usage_perc", "Share of the KV pool that running sequences hold, 0 to 1.", held / max(1, stats.kv_total))
        self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix tree.", stats.prefix_queries)
        self._counter("prefix_cache_hits", "Prompt tokens found in the prefix tree.", stats.prefix_hits)
        self._counter("num_preemptions", "Sequences that lost their KV to others and are computed again.", stats.preemptions)
        self._counter("kv_cache_evictions", "Frames that the prefix tree gave up.", stats.evictions)
        self._counter("engine_steps", "Steps of the engine.", stats.steps)
        if stats.speculation is not None:
            self._of_speculation(stats.speculation)

    def _of_speculation(self, total: Speculation) -> None:
        self._counter("spec_decode_num_drafts", "Drafts that were verified.", total.drafts)
        self._counter("spec_decode_num_draft_tokens", "Tokens of these drafts.", sum(total.drafted))
        self._counter("spec_decode_num_accepted_tokens", "Tokens of these drafts that were right.", sum(total.accepted))
        self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Tokens of these drafts that were right, by position in the draft.",
            ("position",),
            {(str(position),): accepted for position, accepted in enumerate(total.accepted)},
        )

    def _of_cache(self, cache: dict[str, Any]) -> None:
        """What the KV cache holds now; nothing once its engine is gone."""
        states = ("free", "used", "cached")
        self._gauges("kv_cache_frames", "Frames of 8 tokens by state.", ("state",), {(s,): cache[f"{s}_frames"] for s in states})
        self._gauge("kv_cache_shared_frames", "Used frames that several sequences hold.", cache["shared_frames"])
        pages = cache["pages_by_size"].items()
        self._gauges(
            "kv_cache_pages",
            "Pages by state and tokens.",
            ("state", "page_size"),
            {(state, str(size)): counts[state] for size, counts in pages for state in states},
        )
        self._gauges(
            "kv_cache_shared_pages",
            "Used pages of which several sequences hold a frame, by tokens.",
            ("page_size",),
            {(str(size),): counts["shared"] for size, counts in pages},
        )
        self._gauges(
            "kv_cache_bytes_per_token",
            "Of one position in all layers, by format.",
            ("format",),
            {(name,): of_format["per_token"] for name, of_format in cache["bytes_by_format"].items()},
        )
        self._gauges(
            "kv_cache_saved_bytes",
            "What sharing and compression save now.",
            ("by",),
            {(by,): cache[f"saved_by_{by}_gb"] * GB for by in ("sharing", "compression")},
        )
        self._gauge("kv_cache_fragmentation", "Share of held positions with nothing computed, 0 to 1.", cache["fragmentation"])

    def _of_budgets(self, stats: Stats) -> None:
        """What KV budgets have made happen."""
        self._counter("kv_budget_sparsified", "Sequences that began to drop KV frames for their budget.", stats.kv_sparsified)
        self._counter("kv_budget_dropped_frames", "Frames that sequences gave up for their budget.", stats.kv_dropped)
        self._counter("kv_budget_ended", "Sequences that ended because their budget was used up.", stats.kv_ended)
        self._counter("kv_budget_refused", "Requests refused because their prompt exceeds their budget.", stats.kv_refused)

    def _of_handovers(self, stats: HandoverStats, up: bool) -> None:
        """Prompts that are computed here and decoded elsewhere (leases), and the other way round (reservations)."""
        leases, reservations = (stats.leases, stats.reservations) if up else (0, 0)
        self._gauge("handover_leases", "Prompts whose KV frames are computed or kept for another worker.", leases)
        self._gauge("handover_reservations", "Sequences that wait for KV frames of another worker.", reservations)
        ended: dict[tuple[str, ...], float] = {(why,): count for why, count in stats.leases_ended.items()}
        self._counters("handover_leases_ended", "Leases that have ended, by why.", ("reason",), ended)
        self._counter("kv_transfer_chunks", "Chunks of KV frames copied from other workers.", stats.reads)
        self._counter("kv_transfer_bytes", "Of these chunks.", stats.read_bytes)
        self._counter("kv_transfer_seconds", "That copying them took.", stats.read_seconds)
        self._counter(
            "kv_transfer_waited_seconds", "From the end of a prompt elsewhere to when its last frames had come.", stats.waited_seconds
        )
        refused: dict[tuple[str, ...], float] = {(reason,): count for reason, count in stats.refusals.items()}
        self._counters("kv_transfer_refused", "Chunks of KV frames that were not taken, by reason.", ("reason",), refused)

    def _of_store(self, stats: StoreStats, up: bool) -> None:
        """Blocks that are kept in the KV store and taken from it."""
        self._gauge("kv_store_waiting", "Requests that wait for blocks of the KV store.", stats.waiting if up else 0)
        self._counter("kv_store_fetched_tokens", "Tokens whose KV came from the store and was not computed.", stats.fetched_tokens)
        sizes = {name: count for name, count in stats.counts.items() if name.endswith("_bytes")}
        for name, size in sizes.items():
            self._counter(f"kv_store_{name}", f"{name.removesuffix('_bytes').capitalize()}, of the KV store.", size)
        events: dict[tuple[str, ...], float] = {(name,): count for name, count in stats.counts.items() if name not in sizes}
        self._counters("kv_store_events", "What has happened to blocks of the KV store (docs/kv-store.md).", ("event",), events)

    def _gauge(self, name: str, about: str, value: float) -> None:
        self._gauges(name, about, (), {(): value})

    def _gauges(self, name: str, about: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> None:
        self._add(GaugeMetricFamily, name, about, labels, values)

    def _counter(self, name: str, about: str, value: float) -> None:
        self._counters(name, about, (), {(): value})

    def _counters(self, name: str, about: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> None:
        self._add(CounterMetricFamily, name, about, labels, values)

    def _add(self, kind: Any, name: str, about: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> None:
        """values: by the labels' values."""
        if name not in self._found:
            self._found[name] = kind(f"tokenmill:{name}", about, labels=("model_name", "engine", *labels))
        family: Any = self._found[name]
        for of_labels, value in values.items():
            family.add_metric((*self._labels, *of_labels), value)
