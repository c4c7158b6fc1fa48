"""Thousands of requests that are cancelled at random points: nothing leaks, and who stays gets the answer of a run alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

import pytest

from tokenmill import AsyncLLM, RequestOutput, SamplingParams
from tokenmill.core.kv_spelling import Format, Sparsity, kv_settings

CANCELS = 1_700
"""At each of three levels of sparsification."""
TOGETHER = 48
LENGTHS = (9, 30, 200, 780)
"""Of the prompts, but for their last token. The pool has room for little more than the longest."""


async def last(stream: AsyncIterator[RequestOutput]) -> list[int]:
    results = [result async for result in stream]
    return results[-1].outputs[0].token_ids


@pytest.mark.heavy
@pytest.mark.parametrize("level", [None, "topk_heads:0.3", "topk_positions:0.5"])
async def test_thousands_of_cancels(smollm2_path: Path, level: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before their first step, in the midst of their prompt, behind a point of their budget, while they decode.

    One that stays is in the midst of its answer when each crowd comes, and last in order. It loses its frames to a crowd whose largest
    has no room beside it, unless both begin alike.
    """
    monkeypatch.setenv("TOKENMILL_CHECK", "1")
    cache = kv_settings(Format.parse("int8/int4"), None if level is None else Sparsity.parse(level), None)
    cache["kv_cache_config"]["memory_budget_gb"] = 0.0076
    rng = random.Random(5)
    async with AsyncLLM(smollm2_path, max_model_len=832, chunk_size=256, **cache) as llm:
        beginnings = [[rng.randrange(1000, 40_000) for _ in range(800)] for _ in range(4)]
        budget = 700 * llm.info.kv_bytes_per_token / 2**20 if level else None

        def ask(length: int, n: int = 1) -> tuple[list[int], SamplingParams]:
            prompt = [*rng.choice(beginnings)[:length], rng.randrange(40_000)]
            return prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=n, kv_budget_mb=budget)

        async def cancelled(question: tuple[list[int], SamplingParams], priority: int, outputs: int, seconds: float = 0) -> None:
            async with contextlib.aclosing(llm.generate(*question, priority=priority)) as stream:
                if outputs == 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await anext(stream)
                for _ in range(outputs):
                    await anext(stream)

        def anyhow() -> Coroutine[None, None, None]:
            question = ask(rng.choice(LENGTHS), rng.choice((1, 1, 1, 2)))
            return cancelled(question, rng.choice((0, 1, 1, 2)), rng.choice((0, 0, 1, 2, 5, 15)), rng.randrange(60) / 1000)

        questions = [ask(rng.choice(LENGTHS[2:])) for _ in range(8)]
        alone = [await last(llm.generate(*question)) for question in questions]
        crowds = -(-CANCELS // TOGETHER)
        for _ in range(crowds):
            at = rng.randrange(len(questions))
            stays = llm.generate(*questions[at], priority=2)
            await anext(stays)
            largest = cancelled(ask(LENGTHS[-1]), priority=0, outputs=1)
            *_, answer = await asyncio.gather(largest, *(anyhow() for _ in range(TOGETHER - 1)), last(stays))
            assert answer == alone[at]
        stats = await llm.get_kv_cache_stats()
        assert stats["used_frames"] == 0
        assert stats["evictions"] > CANCELS, "the pool is too large to show anything"
        assert stats["preemptions"] > crowds // 2, "there is room for everyone"
