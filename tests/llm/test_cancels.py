"""Thousands of requests that are cancelled at random points: nothing leaks, and who stays gets the answer of a run alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.kv_spelling import Format, Sparsity, kv_settings

CANCELS = 1_700
"""At each of three levels of sparsification."""
TOGETHER = 48


@pytest.mark.heavy
@pytest.mark.parametrize("level", [None, "topk_heads:0.3", "topk_positions:0.5"])
async def test_thousands_of_cancels(smollm2_path: Path, level: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before their first step, in the midst of their prompt, behind a point of their budget, while they decode."""
    monkeypatch.setenv("TOKENMILL_CHECK", "1")
    cache = kv_settings(Format.parse("int8/int4"), None if level is None else Sparsity.parse(level), None)
    cache["kv_cache_config"]["memory_budget_gb"] = 0.02
    rng = random.Random(5)
    async with AsyncLLM(smollm2_path, max_model_len=1024, chunk_size=256, **cache) as llm:
        beginnings = [[rng.randrange(1000, 40_000) for _ in range(800)] for _ in range(4)]
        budget = 700 * llm.info.kv_bytes_per_token / 2**20 if level else None

        def ask(n: int) -> tuple[list[int], SamplingParams]:
            prompt = [*rng.choice(beginnings)[: rng.choice((9, 30, 200, 780))], rng.randrange(40_000)]
            return prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=n, kv_budget_mb=budget)

        async def cancelled(outputs: int, steps: int) -> None:
            prompt, params = ask(rng.choice((1, 1, 1, 2)))
            async with contextlib.aclosing(llm.generate(prompt, params, priority=rng.choice((0, 1, 1, 2)))) as stream:
                if outputs == 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(steps / 1000):
                            await anext(stream)
                for _ in range(outputs):
                    await anext(stream)

        async def whole(prompt: list[int], params: SamplingParams) -> list[int]:
            tokens: list[int] = []
            async for result in llm.generate(prompt, params):
                tokens = result.outputs[0].token_ids
            return tokens

        questions = [ask(1) for _ in range(8)]
        alone = [await whole(*question) for question in questions]
        done = 0
        while done < CANCELS:
            crowd = [cancelled(rng.choice((0, 0, 1, 2, 5, 15)), rng.randrange(60)) for _ in range(TOGETHER)]
            at = rng.randrange(len(questions))
            *_, answer = await asyncio.gather(*crowd, whole(*questions[at]))
            assert answer == alone[at]
            done += TOGETHER
        stats = await llm.get_kv_cache_stats()
        assert stats["used_frames"] == 0
        assert stats["evictions"] > 0, "the pool is too large to show anything"
