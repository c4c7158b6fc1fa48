"""Compressed keys and values, budgets and sparsification over HTTP: the official client against `tokenmill serve` with the real SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import serving

BYTES_PER_TOKEN = 30 * 3 * 102
LONG = "The mill stands where the river bends, and its wheel has turned for two hundred years. " * 50


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[serving.Served]:
    options = ["--port", "0", "--served-model-name", "smol", "--max-model-len", "2048", "--kv-memory-gb", "0.2"]
    cache = ["--kv", "int8/int4:64:plain", "--sparse", "topk_positions:0.5", "--kv-budget-mb", "16"]
    with serving.running([*serving.TOKENMILL, "serve", str(smollm2_path), *options, *cache]) as process:
        served = serving.Served(process, "")
        served.url = served.until_ready("ready").split(" s: ")[1].split("/v1")[0]
        yield served


@pytest.fixture
def client(served: serving.Served) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client


def ask(client: openai.OpenAI, prompt: str, tokens: float | None = None, **more: Any) -> Any:
    """tokens: whose keys and values fill the budget."""
    extra = {} if tokens is None else {"kv_budget_mb": tokens * BYTES_PER_TOKEN / 2**20}
    settings = {"temperature": 0, "max_tokens": 16} | more
    return client.completions.create(model="smol", prompt=prompt, extra_body={"ignore_eos": True} | extra, **settings)


def test_the_banner_names_the_format(served: serving.Served) -> None:
    assert served.process.stdout is not None
    lines = [next(served.process.stdout) for _ in range(2)]
    assert "int8/int4:64" in lines[1]


def test_usage_says_how_keys_and_values_were_kept(client: openai.OpenAI) -> None:
    answer = ask(client, "The capital of France is")
    assert "Paris" in answer.choices[0].text
    assert answer.usage.kv == {"format": "int8/int4:64", "sparsified_from": None, "dropped_tokens": 0}


def test_an_answer_beyond_its_budget_is_sparsified_and_says_so_streamed_or_whole(client: openai.OpenAI) -> None:
    whole = ask(client, LONG, tokens=700)
    kept = whole.usage.kv
    assert 0 < kept["sparsified_from"] <= 630
    assert kept["dropped_tokens"] > 100
    assert whole.choices[0].finish_reason == "length"
    chunks = list(ask(client, LONG, tokens=700, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.kv == kept
    assert ask(client, LONG).usage.kv["sparsified_from"] is None, "the server's own budget is larger"
    two = ask(client, LONG, tokens=700, n=2)
    assert two.usage.kv["dropped_tokens"] == 2 * kept["dropped_tokens"]


def test_an_answer_that_can_give_up_nothing_ends_with_its_budget(client: openai.OpenAI) -> None:
    answer = ask(client, "Once upon a time", tokens=16)
    assert answer.choices[0].finish_reason == "kv_budget"
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 17


def test_what_a_budget_cannot_hold_is_refused_with_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, LONG, tokens=100)
    assert refused.value.code == "kv_budget_exceeded"
    assert refused.value.param == "kv_budget_mb"
    assert "but the request's KV budget of " in refused.value.message
    with pytest.raises(openai.BadRequestError, match="kv_budget_mb is 17, but a request may have 16 here") as above:
        ask(client, "Hello", tokens=17 * 2**20 / BYTES_PER_TOKEN)
    assert above.value.param == "kv_budget_mb"
