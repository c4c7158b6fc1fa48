"""What is told of requests is what `PDMetrics` shows. Clocks are numbers."""

from __future__ import annotations

import pytest

from tokenmill import PDMetrics
from tokenmill.core.types import FinishReason
from tokenmill.observe import separation
from tokenmill.observe.metrics import Metrics, render

FIELDS = (
    "prefill_latency_ms",
    "decode_latency_per_token",
    "ttft_ms",
    "throughput_tokens_per_sec",
    "kv_transfer_ms",
    "spec_acceptance_rate",
)


def values(metrics: PDMetrics) -> dict[str, list[float]]:
    found = {name: list(getattr(metrics, name)) for name in (*FIELDS, "kv_transfer_exposed_ms")}
    return {name: [pytest.approx(value) for value in of] for name, of in found.items() if of}


def test_a_request_on_one_worker() -> None:
    metrics = PDMetrics()
    times = metrics.request(10.0)
    times.first_output(12.0, 0, 1, 10.5, prefill=False)
    times.choice_ended(16.0, 5, FinishReason.LENGTH)
    assert values(metrics) == {
        "ttft_ms": [2000],
        "prefill_latency_ms": [1500],
        "decode_latency_per_token": [1000],
        "throughput_tokens_per_sec": [5 / 6],
    }


def test_of_a_prompt_that_is_handed_over_what_was_not_hidden_is_told() -> None:
    metrics = PDMetrics()
    times = metrics.request(0.0)
    times.copied(0.02)
    times.first_output(1.0, 0, 1, 0.25, prefill=True)
    times.copied(0.03)
    times.first_output(1.5, 1, 1, 1.0, prefill=False)
    times.choice_ended(3.5, 12, FinishReason.STOP)  # ten more tokens in two seconds
    assert values(metrics) == {
        "ttft_ms": [1000],
        "prefill_latency_ms": [750],
        "kv_transfer_ms": [50],
        "kv_transfer_exposed_ms": [300],
        "decode_latency_per_token": [2500 / 11],
        "throughput_tokens_per_sec": [12 / 3.5],
    }


def test_going_on_at_once_exposes_nothing() -> None:
    metrics = PDMetrics()
    times = metrics.request(0.0)
    times.copied(0.5)
    times.first_output(1.0, 0, 1, 0.0, prefill=True)
    times.first_output(1.1, 1, 1, 1.0, prefill=False)
    times.choice_ended(2.1, 3, FinishReason.LENGTH)
    assert list(metrics.kv_transfer_exposed_ms) == [0]


def test_a_prompt_of_which_nothing_was_copied_is_no_transfer() -> None:
    metrics = PDMetrics()
    times = metrics.request(0.0)
    times.first_output(1.0, 0, 1, 0.0, prefill=True)
    times.first_output(2.0, 1, 1, 1.0, prefill=False)
    times.choice_ended(3.0, 4, FinishReason.LENGTH)
    assert not {"kv_transfer_ms", "kv_transfer_exposed_ms"} & set(values(metrics))


def test_a_worker_that_goes_on_for_one_that_died_is_no_second_first_token() -> None:
    metrics = PDMetrics()
    times = metrics.request(0.0)
    times.first_output(1.0, 0, 1, 0.0, prefill=False)
    times.first_output(5.0, 7, 1, 4.0, prefill=False)
    times.choice_ended(9.0, 9, FinishReason.LENGTH)
    assert values(metrics) == {
        "ttft_ms": [1000],
        "prefill_latency_ms": [1000],
        "decode_latency_per_token": [1000],
        "throughput_tokens_per_sec": [1],
    }


def test_a_prompt_computed_again_elsewhere_is_handed_over_twice() -> None:
    metrics = PDMetrics()
    times = metrics.request(0.0)
    times.copied(0.1)
    times.first_output(1.0, 0, 1, 0.0, prefill=True)
    times.first_output(1.2, 1, 1, 1.0, prefill=False)
    times.copied(0.2)
    times.first_output(3.0, 5, 1, 2.0, prefill=True)
    times.first_output(4.0, 6, 1, 3.0, prefill=False)
    times.choice_ended(6.0, 11, FinishReason.LENGTH)
    assert values(metrics)["kv_transfer_ms"] == [100, 200]
    assert values(metrics)["kv_transfer_exposed_ms"] == [500]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.BROKEN])
def test_what_nobody_wants_any_more_says_nothing_about_decoding(reason: FinishReason) -> None:
    metrics = PDMetrics()
    times = metrics.request(0.0)
    times.first_output(1.0, 0, 1, 0.0, prefill=False)
    times.verified(4, 2)
    times.choice_ended(99.0, 3, reason)
    assert set(values(metrics)) == {"ttft_ms", "prefill_latency_ms"}


def test_a_request_that_ends_before_its_first_token_says_nothing() -> None:
    metrics = PDMetrics()
    metrics.request(0.0).choice_ended(1.0, 0, FinishReason.STOP)
    assert values(metrics) == {}


def test_drafts_count_over_all_of_a_request() -> None:
    metrics = PDMetrics()
    times = metrics.request(0.0)
    times.first_output(1.0, 0, 1, 0.0, prefill=False)
    times.verified(4, 4)
    times.verified(6, 1)
    times.choice_ended(2.0, 8, FinishReason.STOP)
    assert list(metrics.spec_acceptance_rate) == [0.5]


def test_the_report_is_a_table_with_all_that_the_article_has(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = PDMetrics()
    metrics.ttft_ms.extend(range(1, 102))
    found = metrics.report()
    assert found == {"ttft_ms": {"mean": 51, "p50": 51, "p99": 100}}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["metric", "unit", "n", "mean", "P50", "P99"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert set(FIELDS) <= set(rows)
    assert rows["ttft_ms"][1:] == ["ms", "101", "51.0", "51.0", "100.0"]
    assert rows["kv_transfer_ms"][1:] == ["ms", "0", "-", "-", "-"]


def test_the_latest_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separation, "KEPT", 3)
    metrics = PDMetrics()
    for at in range(5):
        metrics.request(0.0).first_output(float(at), 0, 1, 0.0, prefill=False)
    assert list(metrics.ttft_ms) == [2000, 3000, 4000]


def test_under_metrics_they_count_from_the_start() -> None:
    metrics = PDMetrics()
    for copied in (0.002, 0.004):
        times = metrics.request(0.0)
        times.copied(copied)
        times.first_output(0.3, 0, 1, 0.1, prefill=True)
        times.first_output(0.9, 1, 1, 0.3, prefill=False)
        times.choice_ended(1.3, 6, FinishReason.LENGTH)
    text = render(Metrics("m", metrics).families([], True)).decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    sums = {
        "request_prefill_time_seconds": 0.4,
        "request_time_per_output_token_seconds": 0.4,
        "kv_transfer_time_seconds": 0.006,
        "kv_transfer_exposed_seconds": 1.0,
    }
    for name, total in sums.items():
        assert float(samples[f'tokenmill:{name}_count{{model_name="m"}}']) == 2
        assert float(samples[f'tokenmill:{name}_sum{{model_name="m"}}']) == pytest.approx(total)
