"""What is counted is what the text says."""

from __future__ import annotations

import re

import msgspec
import pytest

from tokenmill.core.messages import EngineInfo, PageCounts, Stats
from tokenmill.core.types import Speculation
from tokenmill.observe.engines import EngineStats
from tokenmill.observe.kv_cache import kv_cache_stats
from tokenmill.observe.metrics import Metrics, render

INFO = EngineInfo(
    model="m", architecture="llama", vocab_size=9, max_model_len=40, kv_tokens=40, kv_bytes=4000, kv_bytes_per_token=100,
    kv_format="int8/int4:64",    kv_bytes_saved_per_token=150, max_batch_size=4, chunk_size=8,
    threads=1, kernels="portable", fingerprint="f", pid=1, load_seconds=0.1,
)  # fmt: skip
STATS = Stats(
    running=1, waiting=2, kv_total=10, kv_free=4, kv_cached=1, kv_held=5, kv_shared=2, kv_saved=3, kv_frame_bytes=400, kv_unfilled=10,
    kv_pages={8: PageCounts(0, 2, 1, 0), 16: PageCounts(0, 1, 0, 1), 32: PageCounts(1, 0, 0, 0)}, kv_sparsified=11, kv_dropped=12,
    kv_ended=13, kv_refused=14, prefix_queries=8, prefix_hits=7, preemptions=3, evictions=4, prompt_tokens=0, generation_tokens=0, steps=9,
)  # fmt: skip


def samples(metrics: Metrics, stats: Stats | None = None, up: bool = True) -> dict[str, float]:
    """Values by what stands before them, without `tokenmill:` and the model's name, which every sample must have."""
    engines = [] if stats is None else [EngineStats("w0", INFO, stats, up)]
    lines = [line for line in render(metrics.families(engines, up)).decode().splitlines() if not line.startswith("#")]
    assert all(line.startswith("tokenmill:") and 'model_name="m\\"1"' in line for line in lines)
    always = re.compile(r'(engine="w0"|model_name="m\\"1"),?')
    bare = [re.sub(r",?}", "}", always.sub("", line.removeprefix("tokenmill:"))).replace("{}", "") for line in lines]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in bare)}


def test_a_value_counts_in_its_bucket_and_in_all_above_it() -> None:
    metrics = Metrics('m"1')
    for seconds in (0.0, 0.0025, 0.0026, 100.0):
        metrics.next_output(seconds)
    got = samples(metrics)
    name = "inter_token_latency_seconds"
    buckets = [got[f'{name}_bucket{{le="{bound}"}}'] for bound in ("0.001", "0.0025", "0.005", "1.0", "80.0", "+Inf")]
    assert buckets == [1, 2, 3, 3, 3, 4]
    assert (got[f"{name}_count"], got[f"{name}_sum"]) == (4, 100.0051)


def test_what_has_not_happened_is_zero() -> None:
    got = samples(Metrics('m"1'), None, up=False)
    assert len(got) > 80
    assert set(got.values()) == {0}


def test_each_event_counts_where_it_belongs() -> None:
    metrics = Metrics('m"1')
    metrics.prompt_computed(7)
    metrics.generated(3)
    metrics.generated(2)
    metrics.first_output(0.5, -0.1)
    for reason in ("stop", "stop", "abort"):
        metrics.choice_ended(reason, 2.0)
    got = samples(metrics)
    assert (got["prompt_tokens_total"], got["generation_tokens_total"]) == (7, 5)
    assert (got["time_to_first_token_seconds_sum"], got["request_queue_time_seconds_sum"]) == (0.5, 0)
    assert (got['request_success_total{finished_reason="stop"}'], got['request_success_total{finished_reason="abort"}']) == (2, 1)
    assert (got["e2e_request_latency_seconds_count"], got["e2e_request_latency_seconds_sum"]) == (3, 6)


def test_an_engine_that_is_gone_runs_nothing_but_keeps_its_counts() -> None:
    metrics = Metrics('m"1')
    names = ("engine_up", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_steps_total")
    assert [samples(metrics, STATS, up=True)[name] for name in names] == [1, 1, 2, 0.5, 9]
    assert [samples(metrics, STATS, up=False)[name] for name in names] == [0, 0, 0, 0, 9]


def test_drafts_are_counted_where_somebody_drafts() -> None:
    names = ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    assert not any(name.startswith("spec_decode") for name in samples(Metrics('m"1'), STATS))
    total = Speculation()
    for length, accepted in ((3, 2), (1, 0)):
        total.add(length, accepted)
    got = samples(Metrics('m"1'), msgspec.structs.replace(STATS, speculation=total))
    assert [got[name] for name in names] == [2, 4, 2]
    assert [got[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)] == [1, 1, 0]


def test_the_cache_is_told_by_state_size_format_and_reason() -> None:
    got = samples(Metrics('m"1'), STATS)
    assert [got[f'kv_cache_frames{{state="{state}"}}'] for state in ("free", "used", "cached")] == [4, 5, 1]
    assert [got[f'kv_cache_pages{{page_size="8",state="{state}"}}'] for state in ("free", "used", "cached")] == [0, 2, 1]
    assert got['kv_cache_pages{page_size="32",state="free"}'] == 1
    assert (got["kv_cache_shared_frames"], got['kv_cache_shared_pages{page_size="16"}']) == (2, 1)
    assert got['kv_cache_bytes_per_token{format="int8/int4:64"}'] == 100
    assert (got['kv_cache_saved_bytes{by="sharing"}'], got['kv_cache_saved_bytes{by="compression"}']) == (1200, 3600)
    assert got["kv_cache_fragmentation"] == 0.25
    events = ("sparsified", "dropped_frames", "ended", "refused")
    assert [got[f"kv_budget_{event}_total"] for event in events] == [11, 12, 13, 14]


def test_the_cache_of_an_engine_that_is_gone_holds_nothing_but_events_stay_counted() -> None:
    got = samples(Metrics('m"1'), STATS, up=False)
    assert not any(name.startswith(("kv_cache_frames", "kv_cache_pages", "kv_cache_saved")) for name in got)
    assert got["kv_budget_ended_total"] == 13


def test_frames_and_pages_add_up_by_state_and_size() -> None:
    got = kv_cache_stats(INFO, STATS)
    assert {state: got[f"{state}_frames"] for state in ("total", "free", "used", "cached", "shared")} == {
        "total": 10, "free": 4, "used": 5, "cached": 1, "shared": 2,
    }  # fmt: skip
    assert {state: got[f"{state}_pages"] for state in ("total", "free", "used", "cached", "shared")} == {
        "total": 5, "free": 1, "used": 3, "cached": 1, "shared": 1,
    }  # fmt: skip
    assert got["pages_by_size"][8] == {"total": 3, "free": 0, "used": 2, "cached": 1, "shared": 0}
    assert sum(of_size["total"] for of_size in got["pages_by_size"].values()) == got["total_pages"]


def test_what_is_saved_is_told_by_its_reason() -> None:
    got = kv_cache_stats(INFO, STATS)
    # Of 100 bytes per token 150 are saved against bf16; a frame of one of two groups is 400 bytes.
    assert got["saved_by_sharing_gb"] * 2**30 == 3 * 400
    assert got["saved_by_compression_gb"] * 2**30 == (5 + 1) * 400 * 1.5
    assert got["saved_memory_gb"] == got["saved_by_sharing_gb"] + got["saved_by_compression_gb"]
    assert got["bytes_by_format"] == {
        "int8/int4:64": {"per_token": 100, "total": 4000, "free": 1600, "used": 2000, "cached": 400, "shared": 800}
    }


def test_shares_are_of_what_there_is() -> None:
    got = kv_cache_stats(INFO, STATS)
    assert (got["hit_rate"], got["fragmentation"]) == (7 / 8, 10 / 40)
    idle = msgspec.structs.replace(STATS, kv_held=0, kv_unfilled=0, prefix_queries=0, prefix_hits=0)
    got = kv_cache_stats(INFO, idle)
    assert (got["hit_rate"], got["fragmentation"]) == (0, 0)


@pytest.mark.parametrize(("key", "field"), [("sparsified", 11), ("dropped_frames", 12), ("ended", 13), ("refused", 14)])
def test_events_of_budgets_are_not_mixed_up(key: str, field: int) -> None:
    assert kv_cache_stats(INFO, STATS)["budget_events"][key] == field
