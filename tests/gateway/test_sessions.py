"""Requests of one session go to one worker, over HTTP with real workers. What is asked for says how much of its prompt was cached."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import serving

from tokenmill.cluster.separation import SeparationPolicy

LIMITS = ["--port", "0", "--served-model-name", "smol", "--max-model-len", "1024", "--kv-memory-gb", "0.2", "--threads", "3"]


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[serving.Served]:
    """Three workers that take turns, so that no two requests in a row have one worker by chance."""
    command = [*serving.TOKENMILL, "serve", str(smollm2_path), *LIMITS, "--mixed", "3", "--routing-strategy", "round_robin"]
    with serving.running(command) as process:
        served = serving.Served(process, "")
        served.url = served.until_ready("ready").split(" s: ")[1].split("/v1")[0]
        yield served


@pytest.fixture
def client(served: serving.Served) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client


class Talk:
    """A conversation that grows, and shares no cache with others. cached: of each turn, the prompt tokens that were there already.

    It is so short that each turn is one worker's alone: longer prompts may be handed over, by how fast workers seem to be."""

    def __init__(self, client: openai.OpenAI, about: str, **settings: Any) -> None:
        self._client = client
        self._settings = settings | {"extra_body": {"cache_salt": uuid.uuid4().hex}}
        self._messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": about}]
        self.said: list[str] = []
        self.cached: list[int] = []

    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            answer = self._client.chat.completions.create(
                model="smol", messages=self._messages, max_tokens=3, temperature=0, **self._settings
            )
            text = answer.choices[0].message.content
            assert text is not None
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens < SeparationPolicy().min_tokens
            self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
            self.said.append(text)
            self.cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)


def on(served: serving.Served) -> dict[str, float]:
    """By worker, the prompt tokens that it has been given."""
    names = [worker["name"] for worker in served.get("/v1/workers").json()["data"]]
    return {name: served.metric(f'prefix_cache_queries_total{{engine="{name}",model_name="smol"}}') for name in names}


def asked(served: serving.Served, before: dict[str, float]) -> list[str]:
    """Who has been given something since."""
    return [name for name, tokens in on(served).items() if tokens > before[name]]


@pytest.mark.parametrize(
    "settings",
    [{"prompt_cache_key": "talk of cats"}, {"extra_headers": {"X-Session-Id": "talk-of-cats"}}],
    ids=["field", "header"],
)
def test_a_conversation_stays_where_its_cache_is_and_says_the_same(
    served: serving.Served, client: openai.OpenAI, settings: dict[str, Any]
) -> None:
    loose = Talk(client, "cats")
    before = on(served)
    loose.go_on(3)
    assert len(asked(served, before)) == 3, "without a session they take turns"
    assert loose.cached == [0, 0, 0], "and nobody has what the one before computed"
    before = on(served)
    kept = Talk(client, "cats", **settings)
    kept.go_on(3)
    assert len(asked(served, before)) == 1
    assert 0 == kept.cached[0] < kept.cached[1] < kept.cached[2]
    assert kept.said == loose.said


def test_sessions_of_other_names_are_others_and_completions_have_them_too(served: serving.Served, client: openai.OpenAI) -> None:
    homes: dict[str, list[list[str]]] = {}
    for name in "abc" * 2:
        before = on(served)
        client.completions.create(model="smol", prompt="The sky is", max_tokens=2, extra_body={"prompt_cache_key": name})
        homes.setdefault(name, []).append(asked(served, before))
    assert all(first == again and len(first) == 1 for first, again in homes.values())
    assert len({first[0] for first, _ in homes.values()}) == 3


def test_the_header_counts_before_the_field(served: serving.Served, client: openai.OpenAI) -> None:
    before = on(served)
    for key in ("x", "y", "z"):
        client.completions.create(
            model="smol", prompt="Rain", max_tokens=1, extra_body={"prompt_cache_key": key}, extra_headers={"X-Session-Id": "one"}
        )
    assert len(asked(served, before)) == 1


def test_a_session_whose_worker_is_killed_goes_on_elsewhere_with_the_same_tokens(served: serving.Served, client: openai.OpenAI) -> None:
    alone = Talk(client, "dogs")
    alone.go_on(3)
    before = on(served)
    talk = Talk(client, "dogs", prompt_cache_key="dogs")
    talk.go_on(2)
    (home,) = asked(served, before)
    (pid,) = [worker["pid"] for worker in served.get("/v1/workers").json()["data"] if worker["name"] == home]
    os.kill(pid, signal.SIGKILL)
    talk.go_on(1)
    assert talk.said == alone.said


def test_without_several_workers_a_session_is_taken_too(http: httpx.Client) -> None:
    body = {"model": "parrot", "messages": [{"role": "user", "content": "hi"}], "prompt_cache_key": "k" * 256}
    answer = http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": "!" * 256})
    assert answer.json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize("name", ["", "k" * 257, "two words", "\x7f"])
def test_a_header_that_is_no_name_is_refused(http: httpx.Client, name: str) -> None:
    got = http.post("/v1/completions", json={"model": "parrot", "prompt": "a"}, headers={"X-Session-Id": name})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "X-Session-Id")
    assert "1 to 256" in got.json()["error"]["message"]
