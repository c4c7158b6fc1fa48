"""`tokenmill serve` with two real models: each answers as it does alone, bit for bit, also when a worker of one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import serving

from tokenmill import LLM, SamplingParams
from tokenmill.weights.catalogue import resolve

PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):"]
LONG = "It was a dark and stormy night, and"
LENGTH = 200

Answer = tuple[list[int], list[float], str]
"""Token ids, log-probabilities and text."""


@pytest.fixture(
    scope="module",
    params=["twin", pytest.param("gemma3:270m", marks=pytest.mark.heavy)],
)
def models(request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the names that they are served under. The twin is the same file under another name, which is a model of its own here."""
    if request.param != "twin":
        return {smollm2_path.stem: smollm2_path, request.param: resolve(request.param)}
    twin = tmp_path_factory.mktemp("models") / "twin.gguf"
    twin.symlink_to(smollm2_path)
    return {smollm2_path.stem: smollm2_path, "twin": twin}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, dict[str, Answer]]:
    """What each model says to each prompt, by itself."""
    found: dict[str, dict[str, Answer]] = {}
    for name, path in models.items():
        with LLM(path, max_model_len=512) as llm:
            short = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, logprobs=0))
            long = llm.generate([LONG], SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=0, ignore_eos=True))
            for prompt, result in zip([*PROMPTS, LONG], [*short, *long], strict=True):
                choice = result.outputs[0]
                found.setdefault(name, {})[prompt] = list(choice.token_ids), [each.logprob for each in choice.logprobs or ()], choice.text
    return found


@pytest.fixture(scope="module")
def served(models: dict[str, Path]) -> Iterator[serving.Served]:
    paths = [name if ":" in name else str(path) for name, path in models.items()]
    limits = ["--port", "0", "--max-model-len", "512", "--kv-memory-gb", "0.4", "--threads", "4", "--prefill", "1", "--decode", "1"]
    with serving.running([*serving.TOKENMILL, "serve", *paths, *limits]) as process:
        served = serving.Served(process, "")
        for _ in models:
            served.url = served.until_ready("ready").split(" s: ")[1].split("/v1")[0]
        yield served


@pytest.fixture
def client(served: serving.Served) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client


def ask(client: openai.OpenAI, model: str, prompt: str, **more: Any) -> Any:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logprobs": 0, "extra_body": {"return_token_ids": True}}
    return client.completions.create(model=model, prompt=prompt, **(settings | more))


def answer(parts: list[Any]) -> Answer:
    choices = [part.choices[0] for part in parts]
    tokens = [token for choice in choices for token in choice.token_ids]
    logprobs = [value for choice in choices if choice.logprobs is not None for value in choice.logprobs.token_logprobs]
    return tokens, logprobs, "".join(choice.text for choice in choices)


def workers(served: serving.Served, model: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in served.get("/v1/workers").json()["data"] if each["model"] == model}


def test_each_model_answers_as_it_does_alone(client: openai.OpenAI, models: dict[str, Path], alone: dict[str, dict[str, Answer]]) -> None:
    assert [model.id for model in client.models.list()] == list(models)
    for prompt in PROMPTS:
        for model in models:
            assert answer([ask(client, model, prompt)]) == alone[model][prompt], (model, prompt)
    with pytest.raises(openai.NotFoundError, match=list(models)[1]) as missing:
        ask(client, "gpt-9", "Hello")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_each_model_has_its_workers_and_its_share_of_the_host(served: serving.Served, models: dict[str, Path]) -> None:
    listed = served.get("/v1/workers").json()["data"]
    assert [(each["name"], each["model"], each["threads"]) for each in listed] == [
        (f"{role}-0@{model}", model, 1) for model in models for role in ("prefill", "decode")
    ]
    for model in models:
        names = set(workers(served, model))
        assert {name for name in names if served.metric(f'kv_cache_usage_perc{{engine="{name}",model_name="{model}"}}') == 0} == names
    pids = [each["pid"] for each in listed]
    assert len(serving.descendants(served.process.pid)) == len(pids) + len(models), "the weights of each model are there once"


def test_a_killed_worker_of_one_model_changes_no_answer_of_either(
    served: serving.Served, client: openai.OpenAI, models: dict[str, Path], alone: dict[str, dict[str, Answer]]
) -> None:
    first, second = models
    whole = {"max_tokens": LENGTH, "stream": True, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    streams = {model: ask(client, model, LONG, **whole) for model in models}
    parts = {model: [next(stream)] for model, stream in streams.items()}
    before = {model: {name: each["pid"] for name, each in workers(served, model).items()} for model in models}
    os.kill(before[first][f"decode-0@{first}"], signal.SIGKILL)
    for model, stream in streams.items():
        parts[model] += list(stream)
        assert answer(parts[model]) == alone[model][LONG], model
    serving.until(lambda: all(each["pid"] for each in workers(served, first).values()))
    assert workers(served, first)[f"decode-0@{first}"]["pid"] != before[first][f"decode-0@{first}"]
    assert {name: each["pid"] for name, each in workers(served, second).items()} == before[second]
