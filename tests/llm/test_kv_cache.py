"""Compressed KV, budgets and sparsification through the Python API, on the real model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.core.errors import InvalidRequest, KVBudgetTooSmall
from tokenmill.core.types import KVUsage

MIB = 2**20
LONG = "The history of the town begins with a mill by the river, where grain was ground for all the villages around. " * 60
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def compressed(key: str, value: str, method: str = "none", **more: Any) -> dict[str, Any]:
    return {"compression": {"enabled": True, "key_dtype": key, "value_dtype": value, "calibration_method": method}, **more}


def sparse(**settings: Any) -> dict[str, Any]:
    return {"sparse_attention": {"enabled": True, **settings}}


@pytest.mark.parametrize(
    ("key", "value", "bytes_per_token", "shown"),
    [
        ("bf16", "bf16", 256, "bf16"),
        ("int8", "int8", 132, "int8/int8:64"),
        ("int8", "int4", 102, "int8/int4:64"),
        ("int4", "int4", 70, "int4/int4:64"),
    ],
)
def test_a_format_takes_what_its_arithmetic_says_and_answers(
    smollm2_path: Path, key: str, value: str, bytes_per_token: int, shown: str
) -> None:
    """30 layers of 3 KV heads of 64 channels."""
    with LLM(smollm2_path, max_model_len=512, kv_cache_config=compressed(key, value)) as llm:
        assert llm.info.kv_bytes_per_token == 30 * 3 * bytes_per_token
        result = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0]
        assert result.usage.kv == KVUsage(shown)
        if key != "int4":
            assert "Paris" in result.outputs[0].text


def test_a_format_has_a_fingerprint_of_its_own(smollm2_path: Path) -> None:
    found = set()
    for config in ({}, compressed("int8", "int8"), compressed("int8", "int4"), compressed("bf16", "int4")):
        with LLM(smollm2_path, max_model_len=64, kv_cache_config=config) as llm:
            found.add(llm.info.fingerprint)
    assert len(found) == 4


def test_without_sparse_attention_an_answer_ends_with_its_budget(smollm2_path: Path) -> None:
    with LLM(smollm2_path, max_model_len=2048) as llm:
        free = llm.generate("Once upon a time", GREEDY)[0]
        budget = 16 * llm.info.kv_bytes_per_token / MIB
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, kv_budget_mb=budget)
        ended = llm.generate("Once upon a time", params)[0]
        assert ended.outputs[0].finish_reason == "kv_budget"
        assert len(ended.prompt_token_ids) + len(ended.outputs[0].token_ids) == 17, "the last token needs no room"
        assert ended.outputs[0].token_ids == free.outputs[0].token_ids[: len(ended.outputs[0].token_ids)]
        with pytest.raises(KVBudgetTooSmall, match=r"take \d+ KV frames, .* raise kv_budget_mb to [\d.]+$") as refused:
            llm.generate(LONG, params)
        enough = SamplingParams(max_tokens=1, kv_budget_mb=float(refused.value.message.rpartition(" ")[2]))
        assert llm.generate(LONG, enough)[0].finished
        with pytest.raises(KVBudgetTooSmall, match=r"kv_budget_mb is 0\.001, but the smallest sequence takes") as tiny:
            llm.generate("Hello", SamplingParams(max_tokens=1, kv_budget_mb=0.001))
        least = SamplingParams(max_tokens=1, kv_budget_mb=float(tiny.value.message.split()[-4]))
        assert llm.generate([5] * 7, least)[0].finished
        assert llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids == free.outputs[0].token_ids


def test_a_request_may_lower_its_budget_and_not_raise_it(smollm2_path: Path) -> None:
    config = {"per_request_budget_gb": 32 * 23040 / 2**30}
    with LLM(smollm2_path, max_model_len=512, kv_cache_config=config) as llm:
        assert len(llm.generate([5] * 20, GREEDY)[0].outputs[0].token_ids) == 13
        lower = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, kv_budget_mb=24 * 23040 / MIB)
        assert len(llm.generate([5] * 20, lower)[0].outputs[0].token_ids) == 5
        with pytest.raises(InvalidRequest, match=r"kv_budget_mb is 5, but a request may have 0\.703125 here"):
            llm.generate([5] * 20, SamplingParams(max_tokens=1, kv_budget_mb=5))


@pytest.mark.parametrize("strategy", ["topk_heads", "topk_positions"])
@pytest.mark.parametrize("kv", [{}, compressed("int8", "int4", "minmax")], ids=["bf16", "int8/int4"])
def test_a_sparsified_answer_says_so_keeps_to_its_budget_and_is_the_same_every_time(
    smollm2_path: Path, strategy: str, kv: dict[str, Any]
) -> None:
    """Alone, among others, cut into small steps, from the prefix cache, and preempted: one answer."""
    settings: dict[str, Any] = {"max_model_len": 4096, "attention_config": sparse(strategy=strategy), "kv_cache_config": kv}

    def ask(llm: LLM, *others: str) -> tuple[list[int], KVUsage]:
        budget = 1000 * llm.info.kv_bytes_per_token / MIB
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, kv_budget_mb=budget)
        results = llm.generate([LONG, *others], [params] + [GREEDY] * len(others))
        return results[0].outputs[0].token_ids, results[0].usage.kv

    with LLM(smollm2_path, **settings) as llm:
        tokens, usage = ask(llm)
        assert len(tokens) == 40
        assert usage.sparsified_from is not None
        assert usage.sparsified_from <= 900
        assert usage.sparsified_from % 8 == 0
        assert usage.dropped_tokens > 0
        assert ask(llm) == (tokens, usage), "with its beginning from the cache"
        assert ask(llm, "A dog", LONG[100:900], LONG) == (tokens, usage), "among others"
        whole = llm.generate(LONG, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
        assert whole.usage.kv == KVUsage(llm.info.kv_format)
    with LLM(smollm2_path, chunk_size=40, block_manager_config={"enable_prefix_sharing": False}, threads=1, **settings) as llm:
        assert ask(llm) == (tokens, usage), "in other steps"


def test_memory_of_streaming_heads_comes_back(smollm2_path: Path) -> None:
    """A third of the heads keeps 64 + 256 of 1500 positions."""
    settings: dict[str, Any] = {"attention_config": sparse(keep_ratio=2 / 3), "block_manager_config": {"enable_prefix_sharing": False}}
    with LLM(smollm2_path, max_model_len=2048, **settings) as llm:

        def held(**budget: float) -> int:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **budget)
            stream = llm.stream_generate([5] * 1500, params)
            next(stream)
            used: int = llm.get_kv_cache_stats()["used_frames"]
            stream.close()
            return used

        whole, sparsified = held(), held(kv_budget_mb=1600 * llm.info.kv_bytes_per_token / MIB)
        freed = 1 / 3 * (1 - (64 + 256) / 1500)
        assert 1 - sparsified / whole == pytest.approx(freed, rel=0.05)


async def test_small_requests_get_on_beside_one_that_fills_the_pool(smollm2_path: Path) -> None:
    """The giant takes nearly every frame and grows. Equals that come later end, whether they fit beside it or wait for it; one that is
    more urgent ends before it; and all get the answers of a run alone."""
    config = compressed("int8", "int4", memory_budget_gb=1000 * 9180 / 2**30)
    async with AsyncLLM(smollm2_path, max_model_len=1000, kv_cache_config=config) as llm:
        giant = [7 + i % 900 for i in range(880)]
        began, ended = asyncio.Event(), list[str]()

        async def ask(name: str, prompt: list[int], max_tokens: int, priority: int = 1) -> list[int]:
            tokens: list[int] = []
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            async for result in llm.generate(prompt, params, priority=priority):
                tokens = result.outputs[0].token_ids
                if name == "giant":
                    began.set()
            ended.append(name)
            return tokens

        alone = [await ask("alone", giant, 100), await ask("alone", [50] * 300, 8), await ask("alone", [60] * 30, 8)]
        ended.clear()
        large = asyncio.create_task(ask("giant", giant, 100))
        await began.wait()
        small = [asyncio.create_task(ask("small", [60] * 30, 8)) for _ in range(3)]
        waits = asyncio.create_task(ask("waits", [50] * 300, 8))
        urgent = asyncio.create_task(ask("urgent", [50] * 300, 8, priority=0))
        answers = await asyncio.gather(large, waits, urgent, *small)
        assert answers == [alone[0], alone[1], alone[1], alone[2], alone[2], alone[2]]
        assert ended.index("urgent") < ended.index("giant")
        assert (await llm.get_kv_cache_stats())["preemptions"] > 0
