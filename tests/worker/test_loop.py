"""The order in which a worker, or an engine's thread, does what it does around a step."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from tokenmill.core.messages import Abort, Drain, EngineInfo, Generate, SequenceOutput, Stats
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.llm.thread import EngineThread
from tokenmill.worker import wire
from tokenmill.worker.main import Worker

PATIENCE = 60.0


class Notebook:
    """An engine with one request at most, which writes down what is asked of it. `meanwhile` happens during its first step."""

    info: EngineInfo
    has_work = False

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self._started = False
        self.log: list[str] = []

    def add(self, request: Generate) -> None:
        self.has_work = True
        self.log.append("add")

    def abort(self, request_id: str, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        self.has_work = False
        self.log.append("abort")

    def finish_step(self) -> None:
        if not self._started:
            return
        self.log.append("finish")
        self._meanwhile()

    def step(self) -> list[SequenceOutput]:
        self.log.append("start")
        self._started = True
        return []

    def stats(self) -> Stats:
        raise AssertionError

    def close(self) -> None:
        self.log.append("close")


REQUEST = Generate(request_id="a", prompt=[1], params=SamplingParams())
EXPECTED = ["add", "start", "finish", "abort"]


def test_a_worker_hears_what_came_during_a_step_before_it_plans_the_next() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.split() == EXPECTED, done.stderr


def work() -> None:
    """What that test's process does; a worker ends its process with its socket."""
    ours, theirs = socket.socketpair()

    def meanwhile() -> None:
        for message in (Abort("a"), Drain()):
            wire.send(theirs, message)
        while worker._inbox._messages.qsize() < 2:
            time.sleep(0)

    engine = Notebook(meanwhile)
    worker = Worker(engine, ours)
    wire.send(theirs, REQUEST)
    worker.run()
    print(*engine.log, flush=True)


def test_an_engines_thread_does_what_came_during_a_step_before_it_plans_the_next() -> None:
    aborted = threading.Event()

    def meanwhile() -> None:
        thread.call(lambda engine: engine.abort("a")).add_done_callback(lambda _: aborted.set())

    engine = Notebook(meanwhile)
    thread = EngineThread(engine)  # type: ignore[arg-type]
    thread.call(lambda engine: engine.add(REQUEST))
    assert aborted.wait(PATIENCE)
    thread.close()
    assert engine.log[: len(EXPECTED)] == EXPECTED
    assert engine.log[-1] == "close"


if __name__ == "__main__":
    work()
