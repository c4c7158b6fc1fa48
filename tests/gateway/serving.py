"""Servers in processes of their own, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai

HERE = Path(__file__).parent

TOKENMILL = [sys.executable, "-c", "from tokenmill.cli.main import main; main()"]
"""The command line of the package under test."""


class Served:
    """A running server. `url` is known at once, the rest once `until_ready` has returned."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.log: list[str] = []

    def until_ready(self, mark: str = "ready") -> str:
        """The first line that begins with `mark`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if line.startswith(mark):
                return line
        raise AssertionError("the server ended before it was ready:\n" + "".join(self.log))

    def http(self) -> httpx.Client:
        # Building a TLS context takes longer than most tests.
        return httpx.Client(base_url=self.url, timeout=30, verify=False)

    def http_async(self) -> httpx.AsyncClient:
        """Without a limit on connections."""
        return httpx.AsyncClient(base_url=self.url, timeout=30, verify=False, limits=httpx.Limits(max_connections=None))

    def get(self, path: str) -> httpx.Response:
        """One answer over a connection of its own."""
        with self.http() as http:
            return http.get(path)

    def openai(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", max_retries=0, timeout=60, **({"api_key": "none"} | settings))

    def engine_pid(self) -> int:
        """The engine process, which is forked by the server's only child."""
        (pid,) = child_pids(self.nursery_pid())
        return pid

    def nursery_pid(self) -> int:
        """The process that holds the model."""
        (pid,) = child_pids(self.process.pid)
        return pid

    def metric(self, name: str) -> float:
        """The value of a metric, by its name alone or with all of its labels."""
        text = self.get("/metrics").text
        labels = "" if "{" in name else r"(?:{[^}]*})?"
        match = re.search(rf"^tokenmill:{re.escape(name)}{labels} ([0-9.e+-]+)$", text, re.MULTILINE)
        assert match, f"no metric {name} in:\n{text}"
        return float(match[1])


def until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Seconds until `condition()` was true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it never came true"
        time.sleep(0.002)
    return time.monotonic() - start


def descendants(pid: int) -> list[int]:
    """Children, their children and so on."""
    return [found for child in child_pids(pid) for found in (child, *descendants(child))]


def child_pids(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose standard output is read by the test; killed, with its engine, at the end."""
    # An engine that is idle then looks for the owner of every frame, and ends if one has none.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TOKENMILL_CHECK": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def scripted(ready: bool = True, **setup: Any) -> Iterator[Served]:
    """A server over the scripted engine; the fields of `scripted_serve.Setup`."""
    command = [sys.executable, str(HERE / "scripted_serve.py"), msgspec.json.encode(setup).decode()]
    with running(command) as process:
        assert process.stdout is not None
        served = Served(process, process.stdout.readline().strip())
        if ready:
            served.until_ready()
        yield served


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream that was read to its end, decoded; the last one must be `[DONE]`."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]"
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]
