"""Several models behind one gateway: each has its own vocabulary, workers, faults and figures."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import serving

BIRDS = ("parrot", "crow")


def chat(model: str, text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]} | more


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


@contextlib.contextmanager
def birds(**setup: Any) -> Iterator[serving.Served]:
    """`parrot` and `crow`, both ready."""
    with serving.scripted(**({"shouting": {}} | setup)) as served:
        served.until_ready()
        yield served


@pytest.fixture(scope="module")
def served() -> Iterator[serving.Served]:
    with birds() as served:
        yield served


@pytest.fixture
def http(served: serving.Served) -> Iterator[httpx.Client]:
    with served.http() as client:
        yield client


def workers(served: serving.Served) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in served.get("/v1/workers").json()["data"]}


def health(served: serving.Served) -> tuple[int, dict[str, Any]]:
    answer = served.get("/health")
    return answer.status_code, answer.json()


def test_a_request_is_answered_by_its_model_with_its_template(http: httpx.Client) -> None:
    for model, answer in (("parrot", "hello"), ("crow", "HELLO"), ("polly", "hello")):
        response = http.post("/v1/chat/completions", json=chat(model))
        assert (said(response), response.json()["model"]) == (answer, model)
    tokens = [http.post("/tokenize", json=chat(model)).json()["tokens"] for model in ("parrot", "crow")]
    assert tokens == [list(b"hello"), list(b"HELLO")]


def test_all_models_are_listed_and_an_unknown_one_is_told_of_them(http: httpx.Client) -> None:
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["parrot", "polly", "crow"]
    assert http.get("/v1/models/crow").json()["id"] == "crow"
    for response in (
        http.post("/v1/chat/completions", json=chat("gpt-9")),
        http.post("/tokenize", json={"model": "gpt-9", "prompt": "a"}),
        http.get("/v1/models/gpt-9"),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "'parrot', 'polly', 'crow'" in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})])
def test_where_a_model_may_be_left_out_it_may_not_with_several(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = http.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "'crow'" in refused.json()["error"]["message"]
    assert http.post(path, json=body | {"model": "crow"}).status_code == 200


def test_workers_are_listed_with_their_models(served: serving.Served) -> None:
    assert [(w["name"], w["model"], w["state"]) for w in workers(served).values()] == [
        ("mixed-0", "parrot", "healthy"),
        ("mixed-0@crow", "crow", "healthy"),
    ]
    shown = subprocess.run(
        [*serving.TOKENMILL, "workers", "list", "--url", served.url], capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    assert [line.split()[:2] for line in shown] == [["NAME", "MODEL"], ["mixed-0", "parrot"], ["mixed-0@crow", "crow"]]
    with served.http() as http:
        alone = http.post("/v1/workers/remove", json={"name": "mixed-0@crow"})
        assert "the only one that answers requests for 'crow'" in alone.json()["error"]["message"]
        unknown = http.post("/v1/workers/migrate", json={"name": "mixed-7"})
        assert "only mixed-0, mixed-0@crow" in unknown.json()["error"]["message"]


def test_metrics_are_each_models_own_in_families_that_are_told_once(served: serving.Served, http: httpx.Client) -> None:
    def generated(model: str) -> float:
        return served.metric(f'generation_tokens_total{{model_name="{model}"}}')

    before = generated("parrot"), generated("crow")
    http.post("/v1/chat/completions", json=chat("crow", "abc"))
    assert (generated("parrot"), generated("crow")) == (before[0], before[1] + 4)
    assert served.metric('engine_up{model_name="parrot"}') == served.metric('engine_up{model_name="crow"}') == 1
    assert served.metric('num_requests_running{engine="mixed-0@crow",model_name="crow"}') == 0
    assert served.metric('num_requests_running{engine="mixed-0",model_name="parrot"}') == 0
    text = http.get("/metrics").text
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))
    families = [re.sub(r"_(total|bucket|sum|count|created)$", "", line.split("{")[0]) for line in text.splitlines() if line[0] != "#"]
    assert len([name for name, before in zip(families, ["", *families], strict=False) if name != before]) == len(set(families))


def test_while_one_model_loads_the_other_answers() -> None:
    with serving.scripted(shouting={"load_seconds": 60}) as served, served.http() as http:
        assert said(http.post("/v1/chat/completions", json=chat("parrot"))) == "hello"
        waiting = http.post("/v1/chat/completions", json=chat("crow"))
        assert (waiting.status_code, waiting.json()["error"]["message"]) == (503, "the model is loading: try again shortly")
        assert health(served) == (200, {"status": "ok", "models": {"parrot": "ok", "crow": "loading"}})
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["parrot", "polly"]
        assert http.get("/v1/models/crow").status_code == 503


def test_before_any_is_ready_the_server_is_not() -> None:
    with serving.scripted(ready=False, script={"load_seconds": 60}, shouting={"load_seconds": 60}) as served, served.http() as http:
        serving.until(lambda: health(served)[0] == 503)
        assert health(served)[1] == {"status": "loading", "models": {"parrot": "loading", "crow": "loading"}}
        assert http.get("/v1/models").status_code == 503


def test_a_model_that_cannot_be_loaded_at_first_ends_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    with serving.scripted(ready=False, shouting={"weights_error": "no such crow"}) as served:
        assert served.process.wait(20) == 1
    told = capfd.readouterr().err
    assert "model crow cannot be loaded" in told
    assert "tokenmill: no such crow" in told


def test_a_model_that_is_given_up_says_so_and_the_other_goes_on(tmp_path: Path) -> None:
    spent = tmp_path / "spent"
    spent.touch()
    slow = {"step_seconds": 0.005}
    crow = slow | {"load_error": "the file has changed", "once": str(spent)}
    policy = {"first_delay": 0.01, "load_attempts": 1}
    with birds(policy=policy, shouting=crow, script=slow) as served, served.http() as http:
        with (
            http.stream("POST", "/v1/chat/completions", json=chat("parrot", "abcdefgh" * 20, stream=True)) as other,
            http.stream("POST", "/v1/chat/completions", json=chat("crow", "abcdefgh" * 20, stream=True)) as cut,
        ):
            lines = [other.iter_lines(), cut.iter_lines()]
            for line in lines:
                next(line)
            spent.unlink()
            os.kill(workers(served)["mixed-0@crow"]["pid"], signal.SIGKILL)
            errors = [[line for line in each if '"error"' in line] for each in lines]
            assert [len(found) for found in errors] == [0, 1]
            assert "could not be started again: the file has changed" in errors[1][0]
        status, told = health(served)
        assert (status, told) == (200, {"status": "ok", "models": {"parrot": "ok", "crow": "down"}})
        refused = http.post("/v1/chat/completions", json=chat("crow"))
        assert refused.status_code == 503
        assert "could not be started again" in refused.json()["error"]["message"]
        assert said(http.post("/v1/chat/completions", json=chat("parrot"))) == "hello"
        assert served.metric('engine_up{model_name="crow"}') == 0
        served.process.terminate()
        assert served.process.wait(20) == 0


def test_when_all_models_are_given_up_the_server_ends(tmp_path: Path) -> None:
    marks = [tmp_path / name for name in ("parrot", "crow")]
    for mark in marks:
        mark.touch()
    scripts = [{"load_error": "the file has changed", "once": str(mark)} for mark in marks]
    with birds(policy={"first_delay": 0.01, "load_attempts": 1}, script=scripts[0], shouting=scripts[1]) as served:
        for mark in marks:
            mark.unlink()
        pids = [worker["pid"] for worker in workers(served).values()]
        os.kill(pids[1], signal.SIGKILL)
        serving.until(lambda: health(served)[1]["models"]["crow"] == "down")
        assert served.process.poll() is None
        os.kill(pids[0], signal.SIGKILL)
        assert served.process.wait(20) == 1


def test_a_signal_finishes_what_all_models_have_in_flight() -> None:
    slow = {"step_seconds": 0.005}
    with birds(script=slow, shouting=slow) as served, served.http() as http, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(http.stream("POST", "/v1/chat/completions", json=chat(m, "abc" * 30, stream=True))) for m in BIRDS]
        processes = serving.descendants(served.process.pid)
        assert len(processes) == 4, "of each model an engine, and who holds its weights"
        for stream in streams:
            assert stream.status_code == 200
        served.process.terminate()
        for stream in streams:
            assert '"error"' not in stream.read().decode()
        assert served.process.wait(20) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
