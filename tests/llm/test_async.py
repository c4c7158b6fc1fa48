from __future__ import annotations

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, AsyncLLM, RequestOutput, SamplingParams
from tokenmill.core.errors import ContextLengthExceeded, EngineDied, InvalidRequest, Unavailable

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ENDLESS = SamplingParams(max_tokens=480, ignore_eos=True)
FRANCE = "The capital of France is"


@pytest.fixture
async def llm(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncLLM]:
    """The real SmolLM2; a test must leave it without a held frame, and no thread may stay behind."""
    monkeypatch.setenv("TOKENMILL_CHECK", "1")
    async with AsyncLLM(smollm2_path, max_model_len=512, kv_cache_config={"memory_budget_gb": 0.25}) as made:
        yield made
        assert (await made.get_kv_cache_stats())["used_frames"] == 0
    assert not engine_threads()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tokenmill-engine"]


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    results = [result async for result in stream]
    return results[-1]


async def begun(llm: AsyncLLM) -> Any:
    """A stream that has given its first result and would go on for long."""
    stream = llm.generate(FRANCE, ENDLESS)
    await anext(stream)
    assert (await llm.get_kv_cache_stats())["used_frames"] > 0
    return stream


async def test_many_side_by_side_are_answered_as_alone(llm: AsyncLLM, shared_llm: LLM) -> None:
    prompts = [f"Number {i} is" for i in range(24)]
    params = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=4 + i % 5, logprobs=1) for i in range(24)]
    results = await asyncio.gather(*(last(llm.generate(p, s)) for p, s in zip(prompts, params, strict=True)))
    for result, offline in zip(results, shared_llm.generate(prompts, params), strict=True):
        assert result.finished
        assert (result.prompt, result.outputs) == (offline.prompt, offline.outputs)


async def test_a_stream_grows_to_the_answer_of_chat(llm: AsyncLLM, shared_llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello! Who are you?"}]
    texts = [result.outputs[0].text async for result in llm.chat(messages, GREEDY)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert len(set(texts)) > 4
    assert texts[-1] == shared_llm.chat(messages, GREEDY)[0].outputs[0].text


async def test_a_stop_string_ends_a_choice_and_its_work(llm: AsyncLLM, shared_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, stop=("is",), n=2)
    result = await last(llm.generate("A story:", params))
    assert [c.finish_reason for c in result.outputs] == ["stop", "stop"]
    assert result.outputs == shared_llm.generate("A story:", params)[0].outputs


async def test_cancelling_the_task_frees_the_frames(llm: AsyncLLM) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate(FRANCE, ENDLESS):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    assert (await llm.get_kv_cache_stats())["used_frames"] > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await llm.get_kv_cache_stats())["used_frames"] == 0


async def test_leaving_the_iterator_early_frees_the_frames(llm: AsyncLLM) -> None:
    async for _ in llm.generate(FRANCE, ENDLESS):
        break
    # The loop closes the abandoned generator in a task of its own; each look at the counters lets it run, for a step at most.
    looks = [(await llm.get_kv_cache_stats())["used_frames"] for _ in range(5)]
    assert looks[-1] == 0
    async with aclosing(llm.generate(FRANCE, ENDLESS)) as stream:
        await anext(stream)
    assert (await llm.get_kv_cache_stats())["used_frames"] == 0


async def test_others_go_on_when_one_leaves(llm: AsyncLLM, shared_llm: LLM) -> None:
    other = await begun(llm)
    answers = asyncio.gather(*(last(llm.generate(FRANCE, GREEDY)) for _ in range(3)))
    await other.aclose()
    assert [r.outputs for r in await answers] == [shared_llm.generate(FRANCE, GREEDY)[0].outputs] * 3


BAD: list[tuple[Any, SamplingParams | None, type[Exception]]] = [
    ("", None, InvalidRequest),
    ([10**6], None, InvalidRequest),
    (5, None, InvalidRequest),
    ([1] * 600, None, ContextLengthExceeded),
    (FRANCE, SamplingParams(temperature=-1), InvalidRequest),
]


@pytest.mark.parametrize(("prompt", "params", "error"), BAD)
async def test_what_cannot_be_served_fails_at_the_first_step(
    llm: AsyncLLM, prompt: Any, params: SamplingParams | None, error: type[Exception]
) -> None:
    stream = llm.generate(prompt, params)
    with pytest.raises(error):
        await anext(stream)


@pytest.mark.parametrize("options", [{"priority": 3}, {"priority": "high"}, {"cache_salt": 5}])
async def test_a_priority_or_salt_that_is_none_is_refused(llm: AsyncLLM, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        await anext(llm.generate(FRANCE, GREEDY, **options))


async def test_priority_and_salt_do_not_change_the_answer(llm: AsyncLLM, shared_llm: LLM) -> None:
    result = await last(llm.generate(FRANCE, GREEDY, priority=0, cache_salt="mine"))
    assert result.outputs == shared_llm.generate(FRANCE, GREEDY)[0].outputs


async def test_closing_fails_what_is_in_flight_and_what_comes_after(smollm2_path: Path) -> None:
    llm = AsyncLLM(smollm2_path, max_model_len=512)
    streams = [await begun(llm) for _ in range(3)]
    tasks = [asyncio.create_task(last(stream)) for stream in streams]
    await llm.close()
    await llm.close()
    assert not engine_threads()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, Unavailable)
        assert "this AsyncLLM is closed: make a new one" in str(error)
    with pytest.raises(Unavailable, match="closed"):
        await anext(llm.generate(FRANCE))
    with pytest.raises(Unavailable, match="closed"):
        await llm.get_kv_cache_stats()


async def test_a_fault_in_the_engine_reaches_every_caller_now_and_later(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(smollm2_path, max_model_len=512)
    streams = [await begun(llm) for _ in range(2)]

    def fail(*_: object) -> None:
        raise AssertionError("a frame has two owners")

    monkeypatch.setattr("tokenmill.engine.engine.Engine.start_step", fail)
    errors = await asyncio.gather(*(last(stream) for stream in streams), last(llm.generate(FRANCE)), return_exceptions=True)
    for error in errors:
        assert isinstance(error, EngineDied)
        assert "the engine has failed (AssertionError: a frame has two owners)" in str(error)
        assert isinstance(error.__cause__, AssertionError)
    with pytest.raises(EngineDied, match="two owners"):
        await llm.get_kv_cache_stats()
    await llm.close()
    assert not engine_threads()


async def test_a_forgotten_one_ends_its_thread(smollm2_path: Path) -> None:
    llm = AsyncLLM(smollm2_path, max_model_len=64)
    assert await last(llm.generate(FRANCE, GREEDY))
    assert len(engine_threads()) == 1
    del llm
    gc.collect()
    assert not engine_threads()


def test_several_loops_may_share_one(smollm2_path: Path) -> None:
    llm = AsyncLLM(smollm2_path, max_model_len=64)
    try:
        texts = [asyncio.run(last(llm.generate(FRANCE, GREEDY))).outputs[0].text for _ in range(2)]
        assert texts[0] == texts[1]
    finally:
        asyncio.run(llm.close())


def test_a_program_that_ends_in_mid_stream_ends_cleanly(smollm2_path: Path) -> None:
    source = """
import asyncio, sys
from tokenmill import AsyncLLM, SamplingParams

async def main():
    async for _ in llm.generate("a", SamplingParams(max_tokens=480, ignore_eos=True)):
        print("streaming")
        break

llm = AsyncLLM(sys.argv[1], max_model_len=512)
stream = llm.generate("b", SamplingParams(max_tokens=480, ignore_eos=True))
asyncio.run(main())
"""
    result = subprocess.run([sys.executable, "-c", source, str(smollm2_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "streaming\n", "")
