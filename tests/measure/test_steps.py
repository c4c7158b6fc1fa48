from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill import LLM
from tokenmill.core.errors import ConfigError, InvalidRequest
from tokenmill.kernels.native import Pool
from tokenmill.measure import steps
from tokenmill.measure.latency import Grid, latency_table, measure_latency
from tokenmill.measure.latency import charts as latency_charts
from tokenmill.measure.offline import Job, measure_offline
from tokenmill.measure.report import Ceilings
from tokenmill.measure.serving import Record
from tokenmill.measure.steps import ForwardPass, chart, engine_steps, steps_table
from tokenmill.measure.targets import now
from tokenmill.measure.workload import Ask, Lengths

CEILINGS = Ceilings(read=1e12, int8=1e15, bf16=1e15)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "DECODE_RUNS", 3)
    monkeypatch.setattr(steps, "PREFILL_RUNS", 1)


def test_the_forward_pass_is_timed_beside_its_floor(smollm2_path: Path) -> None:
    forward = ForwardPass(smollm2_path, Pool(1), prompt=16, streams=3, context=20, seed=0)
    prefill, decode = forward.prefill(CEILINGS), forward.decode(CEILINGS, 3)
    assert (prefill["phase"], prefill["tokens"]) == ("prefill", 16)
    assert (decode["phase"], decode["streams"], decode["context"]) == ("decode", 3, 20)
    for row in (prefill, decode):
        assert 0 < float(row["ratio"] or 0) < 1
        assert float(row["tokens_per_second"] or 0) < float(row["floor_tokens_per_second"] or 0)
    with pytest.raises(ConfigError, match="65 is above 64"):
        ForwardPass(smollm2_path, Pool(1), prompt=16, streams=65, context=20, seed=0)


def test_an_engines_decode_steps_have_all_sequences_in_them(smollm2_path: Path) -> None:
    table = steps_table("steps", "")
    table.rows.extend(engine_steps(smollm2_path, 1, [1, 3], 12, CEILINGS, seed=0))
    assert [(row["streams"], row["tokens"]) for row in table.rows] == [(1, 1), (3, 3)]
    assert all(12 < int(row["context"] or 0) < 24 for row in table.rows)
    measured, floor = chart(table).lines
    assert list(measured.xs) == [1.0, 3.0]
    assert all(high > low for high, low in zip(measured.ys, floor.ys, strict=True))


def test_more_sequences_than_fit_are_refused(smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"need [\d.]+ GB of KV cache, the pool has [\d.]+: lower --batch-sizes or --context"):
        list(engine_steps(smollm2_path, 1, [4096], 8000, CEILINGS, seed=0))


def test_a_batch_job_is_split_into_its_phases(smollm2_path: Path) -> None:
    with LLM(smollm2_path, threads=1, max_model_len=64, block_manager_config={"enable_prefix_sharing": False}) as llm:
        job = Job.draw(Lengths(4, 8), Lengths(6, 6), 3, llm.info.vocab_size, seed=0)
        rows = {row["phase"]: row for row in measure_offline(llm, smollm2_path, job, CEILINGS)}
    prompts = sum(map(len, job.prompts))
    assert {phase: row["tokens"] for phase, row in rows.items()} == {"prefill": prompts, "decode": 15, "output": 18, "total": prompts + 18}
    assert float(rows["prefill"]["seconds"] or 0) + float(rows["decode"]["seconds"] or 0) == pytest.approx(rows["total"]["seconds"])


class Clockwork:
    """Answers in pieces at fixed distances, without waiting. tokens: of each piece."""

    def __init__(self, error: str | None = None, tokens: int = 1) -> None:
        self.error, self.tokens = error, tokens

    async def send(self, ask: Ask, record: Record) -> None:
        record.sent = now()
        record.times = [record.scheduled + 0.5 + 0.01 * n for n in range(ask.max_tokens // self.tokens)]
        record.ended, record.error = record.times[-1], self.error
        record.prompt_tokens, record.output_tokens = len(ask.prompt.split(" ")), ask.max_tokens


async def test_latency_has_a_row_for_each_number_of_streams_and_prompt() -> None:
    table = latency_table(with_floors=False)
    async for row in measure_latency(Clockwork(), Grid([8, 32], [1, 4], output=5, rounds=3, seed=0), None):
        table.rows.append(row)
    assert [(r["streams"], r["prompt_tokens"], r["requests"]) for r in table.rows] == [(1, 8, 3), (1, 32, 3), (4, 8, 12), (4, 32, 12)]
    assert all(row["ttft_p50"] == pytest.approx(0.5) and row["itl_p99"] == pytest.approx(0.01) for row in table.rows)
    first, later = latency_charts(table)
    assert [line.label for line in first.lines] == ["1 streams", "4 streams"]
    assert [line.label for line in later.lines] == ["prompt 8", "prompt 32"]


async def test_pieces_of_several_tokens_have_their_distance_and_a_time_per_token() -> None:
    async for row in measure_latency(Clockwork(tokens=4), Grid([8], [1], output=12, rounds=1, seed=0), None):
        assert row["itl_p50"] == pytest.approx(0.01)
        assert row["tpot_p50"] == pytest.approx(0.02 / 11)


async def test_a_failed_request_ends_a_latency_benchmark_with_its_error() -> None:
    with pytest.raises(InvalidRequest, match="a request failed: HTTP 503"):
        async for _ in measure_latency(Clockwork("HTTP 503"), Grid([8], [1], 2, 1, 0), None):
            pass
