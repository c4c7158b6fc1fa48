"""Workers seen, left and removed while they serve, over HTTP and from the command line."""

from __future__ import annotations

import subprocess
from typing import Any

import httpx
import msgspec
import pytest
import serving

TEXT = "abcdefghij" * 40
ASKED = {"model": "parrot", "messages": [{"role": "user", "content": TEXT}], "stream": True}


def state(served: serving.Served) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in served.get("/v1/workers").json()["data"]}


def post(served: serving.Served, what: str, name: str) -> httpx.Response:
    with served.http() as http:
        return http.post(f"/v1/workers/{what}", json={"name": name})


def tokenmill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*serving.TOKENMILL, *arguments], capture_output=True, text=True, timeout=60)


def said(response: httpx.Response) -> str:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    choices = [msgspec.json.decode(line)["choices"][0] for line in lines[:-1]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_worker_is_left_and_then_removed_under_a_stream() -> None:
    with serving.scripted(workers=2, script={"step_seconds": 0.005}) as served, served.http() as http:
        assert [(w["name"], w["role"], w["state"]) for w in state(served).values()] == [
            ("mixed-0", "mixed", "healthy"), ("mixed-1", "mixed", "healthy"),
        ]  # fmt: skip
        with http.stream("POST", "/v1/chat/completions", json=ASKED) as response:
            serving.until(lambda: any(worker["running"] for worker in state(served).values()))
            (on,) = [name for name, worker in state(served).items() if worker["running"]]
            (other,) = set(state(served)) - {on}
            moved = post(served, "migrate", on)
            assert moved.json() == {"name": on, "migrated": 1}
            serving.until(lambda: state(served)[other]["running"] == 1)
            pid = state(served)[other]["pid"]
            done = tokenmill("workers", "remove", other, "--url", served.url)
            assert (done.returncode, done.stdout) == (0, f"{other} has ended\n"), done.stderr
            assert pid not in serving.descendants(served.process.pid)
            assert list(state(served)) == [on]
            assert said(response) == TEXT
        refused = post(served, "remove", on)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
        assert "the only one that answers" in refused.json()["error"]["message"]


@pytest.mark.parametrize("what", ["migrate", "remove"])
def test_who_is_not_there_is_told_with_those_that_are(parrot: serving.Served, what: str) -> None:
    done = tokenmill("workers", what, "decode-7", "--url", parrot.url)
    assert (done.returncode, done.stderr) == (1, "tokenmill: there is no worker 'decode-7', only mixed-0\n")


def test_the_list_shows_what_the_route_does(parrot: serving.Served) -> None:
    shown = tokenmill("workers", "list", "--url", parrot.url + "/").stdout.splitlines()
    assert shown[0].split()[:3] == ["NAME", "MODEL", "ROLE"]
    assert shown[1].split()[:5] == ["mixed-0", "parrot", "mixed", "healthy", str(parrot.engine_pid())]
    as_json = msgspec.json.decode(tokenmill("workers", "list", "--json", "--url", parrot.url).stdout)
    assert [worker["name"] for worker in as_json] == ["mixed-0"]


def test_without_a_server_or_its_key_the_command_says_so() -> None:
    with serving.scripted(api_key="secret") as served:
        assert "the API key is missing" in tokenmill("workers", "list", "--url", served.url).stderr
        assert tokenmill("workers", "list", "--url", served.url, "--api-key", "secret").returncode == 0
    assert tokenmill("workers", "list", "--url", served.url).stderr.startswith("tokenmill: there is no server at http://127.0.0.1:")
