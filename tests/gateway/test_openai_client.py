"""The official client against `tokenmill serve` with the real SmolLM2."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import serving

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
KEY = "a key with spaces"


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[serving.Served]:
    options = ["--port", "0", "--api-key", KEY, "--served-model-name", "smol", "--max-model-len", "1024", "--kv-memory-gb", "0.2"]
    with serving.running([*serving.TOKENMILL, "serve", str(smollm2_path), *options]) as process:
        served = serving.Served(process, "")
        line = served.until_ready("ready")
        served.url = line.split(" s: ")[1].split("/v1")[0]
        yield served


@pytest.fixture
def client(served: serving.Served) -> Iterator[openai.OpenAI]:
    with served.openai(api_key=KEY) as client:
        yield client


def test_the_banner_says_what_a_user_needs(served: serving.Served) -> None:
    assert served.process.stdout is not None
    lines = [next(served.process.stdout) for _ in range(4)]
    assert "smol" in lines[0]
    assert "1024 tokens" in lines[0]
    assert "tokens" in lines[1]
    assert "threads" in lines[2]
    assert "kernels" in lines[2]
    assert f"curl {served.url}/v1/chat/completions" in lines[3]


def test_a_chat_answer_knows_its_capital(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smol", messages=MESSAGES, temperature=0, max_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smol", messages=MESSAGES, temperature=0, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model="smol", messages=MESSAGES, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_one_seed_gives_one_answer_alone_and_among_others(client: openai.OpenAI) -> None:
    def ask(n: int) -> list[str]:
        answer = client.chat.completions.create(model="smol", messages=MESSAGES, seed=7, temperature=1.2, max_tokens=24, n=n, logprobs=True)
        return [(choice.message.content, [entry.logprob for entry in choice.logprobs.content]) for choice in answer.choices]

    alone, among = ask(1), ask(3)
    assert alone[0] == among[0]
    assert len({text for text, _ in among}) > 1


def test_chat_logprobs_spell_the_answer(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="smol", messages=MESSAGES, temperature=0, max_tokens=16, logprobs=True, top_logprobs=3
    ).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode("utf-8", "ignore") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0


def test_a_stop_string_ends_an_answer_before_it(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(model="smol", messages=MESSAGES, temperature=0, max_tokens=40).choices[0].message.content
    stop = free[len(free) // 2 : len(free) // 2 + 4]
    choice = client.chat.completions.create(model="smol", messages=MESSAGES, temperature=0, max_tokens=40, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == free[: free.index(stop)]


def test_completions_take_ids_and_score_prompts(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(model="smol", prompt=[prompt, "One, two, three,"], temperature=0, max_tokens=4)
    assert "Paris" in answer.choices[0].text
    assert "four" in answer.choices[1].text
    scored = client.completions.create(model="smol", prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0).choices[0]
    assert scored.text.startswith(prompt)
    assert scored.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in scored.logprobs.token_logprobs[1:])
    assert "".join(scored.logprobs.tokens) == scored.text


def test_a_prompt_sent_twice_comes_from_the_cache(client: openai.OpenAI) -> None:
    prompt = "A sentence that nobody else sends to this server, long enough to fill some frames of the cache. " * 3
    first, second = (client.completions.create(model="smol", prompt=prompt, temperature=0, max_tokens=4) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 8
    assert second.choices[0].text == first.choices[0].text


def test_errors_are_the_clients_own(served: serving.Served, client: openai.OpenAI) -> None:
    with served.openai(api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError, match="wrong"):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as overflow:
        client.completions.create(model="smol", prompt="word " * 2000, max_tokens=10)
    assert overflow.value.code == "context_length_exceeded"
    assert "1024" in overflow.value.message
    assert "2000" in overflow.value.message or "2001" in overflow.value.message
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="smol", messages=MESSAGES, temperature=-1)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol"]
    assert client.models.retrieve("smol").id == "smol"


def test_200_clients_that_leave_midway_leave_nothing_held(served: serving.Served, client: openai.OpenAI) -> None:
    async def leave(http: openai.AsyncOpenAI, after: int) -> None:
        stream = await http.chat.completions.create(model="smol", messages=MESSAGES, stream=True, max_tokens=200, seed=after)
        async for _ in stream:
            if (after := after - 1) <= 0:
                break
        await stream.close()

    async def leave_all() -> None:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=KEY, max_retries=0, timeout=120) as http:
            await asyncio.gather(*(leave(http, index % 10) for index in range(200)))

    engine = served.engine_pid()
    asyncio.run(leave_all())
    serving.until(lambda: served.metric("num_requests_running") + served.metric("num_requests_waiting") == 0, seconds=5)
    assert served.metric("kv_cache_usage_perc") == 0
    answer = client.chat.completions.create(model="smol", messages=MESSAGES, temperature=0, max_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert served.engine_pid() == engine
