"""An answer with speculation is the answer without in every field but `usage.speculation`: of a scripted engine whose guesses are right
as often as the script says, and of the real SmolLM2."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = "The wheel turns, turns, turns; the mill grinds, and the river runs on: ünïcödé 水车 too."
DRAFT = 5


def chat(content: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": content}]} | fields


def text(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": prompt} | fields


SCRIPTED = {
    "chat": chat(SAID),
    "logprobs": chat(SAID, logprobs=True, top_logprobs=2, return_token_ids=True),
    "stop string": chat(SAID, stop=["s; the"], logprobs=True, return_token_ids=True),
    "stop string kept": chat(SAID, stop=["s; the"], include_stop_str_in_output=True, return_token_ids=True),
    "stop string in front of the end": chat(SAID, stop=["."], return_token_ids=True),
    "stop string of choices": chat(SAID, stop=["turns,"], n=3, logprobs=True),
    "min_tokens": chat(SAID, stop=["turns"], min_tokens=40),
    "stop token": chat(SAID, stop_token_ids=[ord(";")], return_token_ids=True),
    "max_tokens": chat(SAID, max_tokens=17, logprobs=True),
    "completion": text(SAID, max_tokens=50),
    "echo": text(SAID, max_tokens=50, echo=True, logprobs=2, return_token_ids=True),
    "prompts": text([SAID, "abc", "水车"], max_tokens=20, n=2, logprobs=1, ignore_eos=True),
}


@pytest.fixture(scope="module")
def guessing() -> Iterator[serving.Served]:
    with serving.scripted(script={"draft": DRAFT}) as served:
        yield served


def answer(served: serving.Served, model: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with served.http() as http:
        response = http.post(path, json={"model": model} | body)
    assert response.status_code == 200, response.text
    return comparable(response.json())


def stream(served: serving.Served, model: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {"model": model, "stream": True, "stream_options": {"include_usage": True}} | body
    with served.http() as http:
        response = http.post(path, json=asked)
    assert response.status_code == 200, response.text
    return [comparable(event) for event in serving.events(response)]


def comparable(event: dict[str, Any]) -> dict[str, Any]:
    """Without what is another one's in every answer."""
    assert {"id", "created"} <= event.keys()
    return {key: value for key, value in event.items() if key not in ("id", "created")}


def take_speculation(event: dict[str, Any]) -> dict[str, Any]:
    """Out of the usage."""
    found: dict[str, Any] = event["usage"].pop("speculation")
    return found


def joined(events: list[dict[str, Any]]) -> list[Any]:
    """The choices of a stream, each with its chunks put together, and the last event."""
    choices: dict[int, list[dict[str, Any]]] = {}
    for part in (choice for event in events for choice in event["choices"]):
        choices.setdefault(part["index"], []).append(part)
    return [*(_whole(choices[index]) for index in sorted(choices)), events[-1]]


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    logprobs: dict[str, list[Any]] = {}
    for part in parts:
        for key, entries in (part["logprobs"] or {}).items():
            logprobs.setdefault(key, []).extend(entries or [])
    return {
        "text": "".join(part.get("text") or part.get("delta", {}).get("content", "") for part in parts),
        "token_ids": [token for part in parts for token in part.get("token_ids", [])],
        "logprobs": logprobs,
        "finish_reason": parts[-1]["finish_reason"],
    }


@pytest.mark.parametrize(("path", "body"), SCRIPTED.values(), ids=SCRIPTED)
def test_an_answer_is_the_same_whole_and_streamed(
    parrot: serving.Served, guessing: serving.Served, path: str, body: dict[str, Any]
) -> None:
    plain, drafted = (answer(served, "parrot", path, body) for served in (parrot, guessing))
    counted = take_speculation(drafted)
    assert drafted == plain
    assert counted["proposer"] == "script"
    assert counted["drafted"] == DRAFT * counted["drafts"]
    assert 0 < counted["accepted"] < plain["usage"]["completion_tokens"]
    events, guessed = (stream(served, "parrot", path, body) for served in (parrot, guessing))
    assert take_speculation(guessed[-1]) == counted
    assert joined(guessed) == joined(events)
    assert len(guessed) < len(events)


def test_usage_so_far_counts_what_was_guessed_so_far(guessing: serving.Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    path, body = chat(SAID, stream_options=options)
    counts = [event["usage"]["speculation"]["accepted"] for event in stream(guessing, "parrot", path, body)]
    assert counts == sorted(counts)
    assert counts[0] == 0 < counts[-1]


def test_metrics_count_guesses_and_kept_tokens(guessing: serving.Served) -> None:
    names = ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    counters = (*names, "generation_tokens_total", "inter_token_latency_seconds_count")
    before = [guessing.metric(name) for name in counters]
    path, body = chat(SAID)
    usage = answer(guessing, "parrot", path, body)["usage"]
    counted = usage["speculation"]
    after = [guessing.metric(name) for name in counters]
    wanted = [counted["drafts"], counted["drafted"], counted["accepted"], usage["completion_tokens"], counted["drafts"]]
    assert [b - a for a, b in zip(before, after, strict=True)] == wanted
    of_position = 'spec_decode_num_accepted_tokens_per_pos_total{engine="mixed-0",model_name="parrot",position="%d"}'
    by_position = [guessing.metric(of_position % position) for position in range(DRAFT)]
    assert sum(by_position) == guessing.metric(names[2])
    path, body = chat(SAID, stop=["turns"])
    generated = guessing.metric("generation_tokens_total")
    usage = answer(guessing, "parrot", path, body)["usage"]
    assert guessing.metric("generation_tokens_total") - generated == usage["completion_tokens"], "none behind a stop string"


def test_without_a_proposer_nothing_is_said(http: httpx.Client, parrot: serving.Served) -> None:
    path, body = chat("hello")
    assert "speculation" not in http.post(path, json={"model": "parrot"} | body).json()["usage"]
    assert "spec_decode" not in http.get("/metrics").text


COUNT = "Count: one, two, three, four, five, six, seven, eight, nine, ten. Count again: one, two,"
FRANCE = "What is the capital of France? Answer in one sentence, and say it again."
REAL = {
    "long": text([COUNT, COUNT + " three,"], temperature=0, max_tokens=100, ignore_eos=True),
    "completion": text(COUNT, temperature=0, max_tokens=60, logprobs=2, return_token_ids=True),
    "echo": text(COUNT, temperature=0.5, seed=4, max_tokens=30, echo=True, logprobs=0),
    "stop string": text(COUNT, temperature=0, max_tokens=60, stop=["ght, ni"], logprobs=0, return_token_ids=True),
    "stop string kept": text(COUNT, temperature=0, max_tokens=60, stop=["ght, ni"], include_stop_str_in_output=True),
    "choices": text(COUNT, temperature=0.7, seed=1, n=3, max_tokens=40, min_tokens=6, stop=["."], logprobs=1),
    "penalties": text(COUNT, temperature=0.8, seed=2, max_tokens=60, frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={"28": 1}),
    "chat": chat(FRANCE, temperature=0, max_tokens=60, logprobs=True, top_logprobs=3, return_token_ids=True),
    "chat in front of the end": chat(FRANCE, temperature=0, max_tokens=60, stop=["."], return_token_ids=True),
}


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Iterator[list[serving.Served]]:
    """SmolLM2 twice: by itself, and with guesses."""
    with contextlib.ExitStack() as stack:
        found = []
        for more in ([], ["--speculate", "suffix", "--draft-tokens", "6"]):
            options = ["--port", "0", "--served-model-name", "smol", "--max-model-len", "512", "--kv-memory-gb", "0.2", *more]
            process = stack.enter_context(serving.running([*serving.TOKENMILL, "serve", str(smollm2_path), *options]))
            served = serving.Served(process, "")
            served.url = served.until_ready("ready").split(" s: ")[1].split("/v1")[0]
            found.append(served)
        yield found


def test_the_banner_says_who_guesses(real: list[serving.Served]) -> None:
    banners = [served.until_ready("  try") and "".join(served.log) for served in real]
    assert "drafts" not in banners[0]
    assert "\n  drafts   by suffix\n" in banners[1]


@pytest.mark.parametrize(("path", "body"), REAL.values(), ids=REAL)
def test_the_real_model_answers_the_same_whole_and_streamed(real: list[serving.Served], path: str, body: dict[str, Any]) -> None:
    plain, drafted = (answer(served, "smol", path, body) for served in real)
    counted = take_speculation(drafted)
    assert drafted == plain
    assert counted["proposer"] == "suffix"
    assert len(counted["accepted_by_position"]) <= 6
    events, guessed = (stream(served, "smol", path, body) for served in real)
    take_speculation(guessed[-1])
    assert joined(guessed) == joined(events)


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(real: list[serving.Served]) -> None:
    _, served = real
    path, body = copy.deepcopy(REAL["long"])
    asked = {"model": "smol", "stream": True} | body
    for lines in (2, 9, 20):
        with served.http() as http, http.stream("POST", path, json=asked) as response:
            for _ in zip(range(lines), response.iter_lines(), strict=False):
                pass
    serving.until(lambda: served.metric("num_requests_running") == 0)
    serving.until(lambda: served.metric('kv_cache_frames{engine="mixed-0",model_name="smol",state="used"}') == 0)
    plain, drafted = (answer(each, "smol", path, body) for each in real)
    assert drafted["choices"] == plain["choices"]
    assert served.metric("spec_decode_num_accepted_tokens_total") > 0, "text that repeats itself is guessed"


@pytest.mark.parametrize("who", [["--speculate", "suffix"], ["--draft-model", "{model}", "--draft-tokens", "4"]], ids=["suffix", "draft"])
async def test_streams_closed_at_any_point_leave_nothing_behind(real: list[serving.Served], smollm2_path: Path, who: list[str]) -> None:
    """Every draft is verified in full, so that most are closed while one is. Some streams beside them go on to their end."""
    options = ["--port", "0", "--served-model-name", "smol", "--max-model-len", "128", "--kv-memory-gb", "0.006"]
    more = [option.format(model=smollm2_path) for option in who]
    rng = random.Random(7)
    asked = [
        {"prompt": prompt, "seed": 1, "max_tokens": 80, "extra_body": {"ignore_eos": True}} | {"temperature": temperature}
        for prompt in (COUNT, COUNT[7:], COUNT[14:])
        for temperature in (0, 0.7)
    ]
    with real[0].openai() as client:
        wanted = [client.completions.create(model="smol", **each).choices[0].text for each in asked]
    with serving.running([sys.executable, str(serving.HERE / "eager.py"), "serve", str(smollm2_path), *options, *more]) as process:
        served = serving.Served(process, "")
        served.url = served.until_ready("ready").split(" s: ")[1].split("/v1")[0]
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            places = asyncio.Semaphore(9)

            async def ask(number: int, chunks: int) -> str | None:
                """The text; None if it is left after so many chunks."""
                async with places, await client.completions.create(model="smol", stream=True, **asked[number]) as stream:
                    text = ""
                    async for chunk in stream:
                        if chunks == 0:
                            return None
                        chunks -= 1
                        text += chunk.choices[0].text
                    return text

            crowd = [(rng.randrange(len(asked)), 1000 if i % 8 == 0 else rng.randrange(14)) for i in range(80)]
            texts = await asyncio.gather(*(ask(*each) for each in crowd))
            assert texts.count(None) >= 60, "they were left before their end"
            assert all(text in (None, wanted[number]) for (number, _), text in zip(crowd, texts, strict=True))
            serving.until(lambda: served.metric("num_requests_running") == 0)
            serving.until(lambda: served.metric('kv_cache_frames{engine="mixed-0",model_name="smol",state="used"}') == 0)
            assert await asyncio.gather(*(ask(number, 1000) for number in range(len(asked)))) == wanted
        assert served.metric("spec_decode_num_accepted_tokens_total") > 300
        assert served.metric("num_preemptions_total") > 0
        assert served.get("/health").status_code == 200
        assert served.metric("num_requests_waiting") == 0
