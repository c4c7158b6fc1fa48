"""What is counted is what the text says."""

from __future__ import annotations

import re

from tokenmill.core.messages import Stats
from tokenmill.observe.metrics import Metrics

STATS = Stats(
    running=1, waiting=2, kv_total=10, kv_free=4, kv_cached=1, kv_held=5, prefix_queries=8, prefix_hits=7, preemptions=3, evictions=4,
    prompt_tokens=0, generation_tokens=0, steps=9,
)  # fmt: skip


def samples(metrics: Metrics, stats: Stats | None = None, up: bool = True) -> dict[str, float]:
    """Values by what stands before them, without `tokenmill:` and the model's name, which every sample must have."""
    lines = [line for line in metrics.render(stats, up).decode().splitlines() if not line.startswith("#")]
    assert all(line.startswith("tokenmill:") and 'model_name="m\\"1"' in line for line in lines)
    bare = [re.sub(r',?model_name="m\\"1"', "", line.removeprefix("tokenmill:")).replace("{}", "") for line in lines]
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
