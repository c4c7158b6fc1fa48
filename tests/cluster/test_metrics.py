"""What a cluster tells of real requests, computed by one process and decoded by another."""

from __future__ import annotations

import time
from pathlib import Path

from tokenmill.cluster.division import Workers, divide
from tokenmill.cluster.local import Cluster
from tokenmill.cluster.separation import SeparationPolicy
from tokenmill.core.blocks import block_hashes
from tokenmill.core.config import EngineConfig
from tokenmill.core.cpus import usable_cpus
from tokenmill.core.memory import available_memory
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams


async def test_each_requests_times_are_those_that_its_client_saw(smollm2_path: Path) -> None:
    config = EngineConfig.from_settings(model=str(smollm2_path), threads=2, max_model_len=512, kv_cache_config={"memory_budget_gb": 0.2})
    plans = divide(config, Workers(prefill=1, decode=1), usable_cpus(), available_memory())
    cluster = Cluster(config, plans, separation=SeparationPolicy(always=True, min_tokens=9))
    try:
        await cluster.start()
        began = time.monotonic()
        seen: list[list[float]] = []
        for number, length in enumerate((300, 8)):  # the second one is too short to be handed over
            params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=16)
            prompt = [1000 + (37 * at + number) % 5000 for at in range(length)]
            seen.append([time.monotonic()])
            async for _ in cluster.generate(Generate(request_id=f"r{number}", prompt=prompt, params=params)):
                seen[-1].append(time.monotonic())
        took = time.monotonic() - began
        metrics = cluster.metrics
        reads = {engine.name: engine.stats.handover.read_seconds for engine in await cluster.stats(5) if engine.stats.handover}
    finally:
        await cluster.stop(0)
    slack = 0.05 * took + 0.01
    for at, (arrived, first, *_, last) in enumerate(seen):
        assert abs(metrics.ttft_ms[at] / 1e3 - (first - arrived)) < slack
        assert 0 < metrics.prefill_latency_ms[at] <= metrics.ttft_ms[at]
        assert abs(metrics.decode_latency_per_token[at] / 1e3 - (last - first) / 15) < slack / 15
        assert abs(16 / metrics.throughput_tokens_per_sec[at] - (last - arrived)) < slack
    assert [value / 1e3 for value in metrics.kv_transfer_ms] == [reads["decode-0"]]
    assert len(metrics.kv_transfer_exposed_ms) == 1
    assert not metrics.spec_acceptance_rate


async def test_a_router_hears_what_workers_have_and_give_up(smollm2_path: Path) -> None:
    """Answers, which begin the next turn's prompt, as well as prompts; and what has been evicted it does not believe to be there."""
    config = EngineConfig.from_settings(model=str(smollm2_path), threads=2, max_model_len=512, kv_cache_config={"memory_budget_gb": 0.05})
    plans = divide(config, Workers(mixed=2), usable_cpus(), available_memory())
    cluster = Cluster(config, plans)
    prefixes = cluster._dispatcher._fleet.prefixes
    try:
        await cluster.start()
        fingerprint = cluster.info.fingerprint

        async def ask(name: str, prompt: list[int], tokens: int) -> list[int]:
            params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=tokens)
            answer: list[int] = []
            async for output in cluster.generate(Generate(request_id=name, prompt=prompt, params=params)):
                answer += output.tokens
            return answer

        prompt = [1000 + 37 * at % 5000 for at in range(100)]
        names = block_hashes(prompt + await ask("a", prompt, 100), "", fingerprint)
        assert list(prefixes.depths(names).values()) == [3]
        for number in range(12):
            await ask(f"r{number}", [2000 + (91 * at + number) % 5000 for at in range(400)], 1)
        (stats,) = [engine.stats for engine in await cluster.stats(5) if engine.name in prefixes._blocks][:1]
        assert stats.evictions > 0
        assert prefixes.depths(names) == {}
    finally:
        await cluster.stop(0)
