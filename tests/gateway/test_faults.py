"""Clients that leave, engines that die, servers that are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import serving
from serving import until

CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"model": "parrot", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True}


def status(served: serving.Served) -> tuple[int, str]:
    response = served.get("/health")
    return response.status_code, response.json()["status"]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def streaming(served: serving.Served, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with served.http() as http, http.stream("POST", CHAT, json=ENDLESS | {"stream": True} | fields) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        yield lines


@contextlib.contextmanager
def post(served: serving.Served, body: dict[str, Any], send: int | None = None) -> Iterator[socket.socket]:
    """A connection over which a request was sent, or the first bytes of its body, and nothing is read."""
    request = httpx.Request("POST", served.url + CHAT, json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\n{head}\r\n".encode() + request.read()[:send])
        yield client


async def test_200_clients_that_disconnect_leave_nothing_held_and_the_next_is_served() -> None:
    with serving.scripted(script={"step_seconds": 0.002}) as served:

        async def leave_stream(http: httpx.AsyncClient, after: int) -> None:
            async with http.stream("POST", CHAT, json=ENDLESS | {"stream": True}) as response:
                lines = response.aiter_lines()
                for _ in range(after):
                    await anext(lines)

        async def leave_whole(http: httpx.AsyncClient, after: int) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after / 50):
                    await http.post(CHAT, json=ENDLESS)

        async with served.http_async() as http:
            await asyncio.gather(*((leave_stream, leave_whole)[index % 2](http, index % 40) for index in range(200)))
        until(lambda: served.metric("num_requests_running") == 0, 5)
        assert served.metric("kv_cache_usage_perc") == 0
        with served.http() as http:
            answer = http.post(CHAT, json=ENDLESS | {"max_tokens": 3})
            assert answer.json()["choices"][0]["message"]["content"] == "xxx"


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_kv_soon(stream: bool) -> None:
    with serving.scripted(script={"step_seconds": 0.005}) as served:
        with post(served, ENDLESS | {"stream": stream}):
            until(lambda: served.metric("kv_cache_usage_perc") > 0)
        # Loosely: the answer to the question itself takes up to a step too.
        assert until(lambda: served.metric("kv_cache_usage_perc") == 0) < 1.0


def test_a_stream_goes_on_where_it_was_when_its_engine_is_killed_and_has_been_started_again() -> None:
    policy = {"first_delay": 0.3, "ask_every": 0.2, "killed_after": 5.0}
    with serving.scripted(script={"step_seconds": 0.002}, policy=policy) as served:
        assert status(served) == (200, "ok")
        text = "abcdefghij" * 20
        with streaming(served, messages=[{"role": "user", "content": text}], ignore_eos=False) as lines:
            os.kill(served.engine_pid(), signal.SIGKILL)
            until(lambda: status(served) == (503, "down"))
            with served.http() as http:
                refused = http.post(CHAT, json=ENDLESS)
                assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable")
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]"
        chunks = [msgspec.json.decode(line)["choices"][0] for line in rest[:-1]]
        assert text.endswith("".join(chunk["delta"].get("content", "") for chunk in chunks))
        assert chunks[-1]["finish_reason"] == "stop"
        assert status(served) == (200, "ok")


def test_a_request_that_always_ends_its_engine_is_ended_by_an_error_event() -> None:
    with serving.scripted(script={"exit_at": 3}) as served:
        with streaming(served) as lines:
            rest = [line for line in lines if line]
        assert '"engine_died"' in rest[-2]
        assert rest[-2].startswith('data: {"error":{"message":')
        assert rest[-1] == "data: [DONE]"


def test_a_model_without_a_next_token_is_a_500_or_ends_a_stream_with_an_error_event() -> None:
    with serving.scripted(script={"broken_at": 0}) as served, served.http() as http:
        answer = http.post(CHAT, json=ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_broken")
    with serving.scripted(script={"broken_at": 2}) as served:
        with streaming(served) as lines:
            rest = [line for line in lines if line]
        assert '"model_broken"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert status(served) == (200, "ok")
        assert served.metric("kv_cache_usage_perc") == 0


def test_engines_that_die_before_the_first_token_are_a_plain_503() -> None:
    with serving.scripted(script={"exit_at": 1}) as served, served.http() as http:
        response = http.post(CHAT, json=ENDLESS | {"stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_died")
        until(lambda: status(served) == (200, "ok"))


def test_an_engine_that_dies_once_is_not_noticed(tmp_path: Path) -> None:
    with serving.scripted(script={"exit_at": 1, "once": str(tmp_path / "spent")}) as served, served.http() as http:
        answer = http.post(CHAT, json=ENDLESS | {"max_tokens": 3})
        assert answer.json()["choices"][0]["message"]["content"] == "xxx"
        assert (tmp_path / "spent").exists()


def test_an_engine_that_hangs_is_told_by_health_and_then_replaced(tmp_path: Path) -> None:
    script = {"hang_at": 3, "once": str(tmp_path / "spent")}
    policy = {"first_delay": 0.01, "ask_every": 0.1, "stalled_after": 0.5, "killed_after": 1.0}
    with serving.scripted(script=script, policy=policy) as served:
        with streaming(served, max_tokens=9) as lines:
            until(lambda: status(served) == (503, "stalled"))
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert status(served) == (200, "ok")


def test_while_the_model_loads_probes_are_answered_and_requests_refused() -> None:
    with serving.scripted(ready=False, script={"load_seconds": 1.0}) as served, served.http() as http:
        assert status(served) == (503, "loading")
        refused = http.post(CHAT, json=ENDLESS)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable")
        served.until_ready()
        assert status(served) == (200, "ok")


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_message(capfd: pytest.CaptureFixture[str]) -> None:
    with serving.scripted(ready=False, script={"load_error": "tensor 3 is truncated"}) as served:
        assert served.process.wait(20) == 1
    assert "tokenmill: tensor 3 is truncated" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_is_in_flight_refuses_the_new_and_leaves_no_process(number: signal.Signals) -> None:
    with serving.scripted(script={"step_seconds": 0.005}) as served:
        engine = served.engine_pid()
        with streaming(served, max_tokens=200) as lines, served.http() as http:
            served.process.send_signal(number)
            until(lambda: status(served) == (503, "draining"))
            refused = http.post(CHAT, json=ENDLESS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert served.process.wait(20) == 0
        assert gone(engine)


def test_work_that_outlasts_the_shutdown_timeout_is_ended_by_an_error_event() -> None:
    with serving.scripted(script={"step_seconds": 0.005, "max_model_len": 10**6}, shutdown_timeout=0.2) as served:
        engine = served.engine_pid()
        with streaming(served) as lines:
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"code":"unavailable"' in rest[-2]
        assert "the server shut down before the answer was complete" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert served.process.wait(20) == 0
        assert gone(engine)


def test_a_second_signal_ends_everything_at_once() -> None:
    with serving.scripted(script={"step_seconds": 0.005, "max_model_len": 10**6}, shutdown_timeout=600) as served:
        engine = served.engine_pid()
        with streaming(served):
            served.process.send_signal(signal.SIGTERM)
            until(lambda: status(served) == (503, "draining"))
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(5) == 128 + signal.SIGTERM
        until(lambda: gone(engine))


@pytest.mark.parametrize(("what", "processes"), [("weights_seconds", 1), ("load_seconds", 2)])
def test_a_signal_while_the_model_loads_ends_the_server(what: str, processes: int) -> None:
    with serving.scripted(ready=False, script={what: 60.0}) as served:
        until(lambda: status(served) == (503, "loading"))
        until(lambda: len(serving.descendants(served.process.pid)) == processes)
        loading = serving.descendants(served.process.pid)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(10) == 0
        assert all(gone(pid) for pid in loading)


def test_a_second_signal_while_the_model_loads_leaves_no_process() -> None:
    """The server does not wait for what it started; that sees the end of its socket, although it is busy."""
    with serving.scripted(ready=False, script={"weights_seconds": 600.0}) as served:
        until(lambda: len(serving.descendants(served.process.pid)) == 1)
        (loading,) = serving.descendants(served.process.pid)
        served.process.send_signal(signal.SIGINT)
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(10)
        until(lambda: gone(loading))


def test_a_server_that_is_killed_leaves_no_process() -> None:
    with serving.scripted() as served:
        below = serving.descendants(served.process.pid)
        assert len(below) == 2
        served.process.kill()
        until(lambda: all(gone(pid) for pid in below))


def test_when_the_process_with_the_model_is_killed_answers_go_on_and_a_killed_engine_still_comes_back() -> None:
    with serving.scripted(script={"step_seconds": 0.005}) as served:
        engine = served.engine_pid()
        with streaming(served, max_tokens=50) as lines:
            os.kill(served.nursery_pid(), signal.SIGKILL)
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert serving.descendants(served.process.pid) == []
        os.kill(engine, signal.SIGKILL)
        until(lambda: gone(engine) and len(serving.descendants(served.process.pid)) == 2)
        until(lambda: status(served) == (200, "ok"))


def test_a_client_that_never_reads_does_not_hold_up_a_shutdown() -> None:
    with serving.scripted(script={"max_model_len": 10**6}, shutdown_timeout=0.5) as served, post(served, ENDLESS | {"stream": True}):
        until(lambda: served.metric("engine_steps_total") > 40_000, 30)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(15) == 0


def test_a_client_that_leaves_while_it_sends_is_no_fault(capfd: pytest.CaptureFixture[str]) -> None:
    with serving.scripted() as served:
        with post(served, ENDLESS, send=10):
            pass
        assert status(served) == (200, "ok")
        served.process.terminate()
        assert served.process.wait(10) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_an_engine_that_cannot_be_loaded_again_ends_the_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spent = tmp_path / "spent"
    spent.touch()
    script = {"load_error": "the file has changed", "once": str(spent)}
    with serving.scripted(script=script, policy={"first_delay": 0.01, "load_attempts": 1}) as served:
        spent.unlink()
        os.kill(served.engine_pid(), signal.SIGKILL)
        assert served.process.wait(20) == 1
    assert "tokenmill: the file has changed" in capfd.readouterr().err


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*serving.TOKENMILL, "serve", "/no/such/model.gguf", "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr
    assert "--port" in ended.stderr
