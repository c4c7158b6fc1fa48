"""The order in which a worker, or an engine's thread, does what it does around a step."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.core.messages import Abort, Drain, EngineInfo, Generate, SequenceOutput, Stats, StepOutput
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.llm.thread import EngineThread
from tokenmill.worker import wire
from tokenmill.worker.main import Inbox, Worker

PATIENCE = 60.0


class Notebook:
    """An engine with one request at most, which writes down what is asked of it. `meanwhile` happens during its first step."""

    info: EngineInfo
    has_work = False

    @property
    def in_step(self) -> bool:
        return self.has_work

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self._started = self._executed = False
        self.log: list[str] = []

    def add(self, request: Generate) -> None:
        self.has_work = True
        self.log.append("add")

    def abort(self, request_id: str, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        self.has_work = False
        self.log.append("abort")

    def abort_all(self) -> None:
        raise AssertionError

    def execute(self) -> None:
        if self._started and not self._executed:
            self._executed = True
            self._meanwhile()

    def finish_step(self) -> list[SequenceOutput]:
        self.execute()
        if self._started:
            self.log.append("finish")
        return []

    def give_way(self) -> None:
        self.log.append("give-way")

    def start_step(self) -> None:
        if self.has_work:
            self.log.append("start")
            self._started = True

    def stats(self) -> Stats:
        raise AssertionError

    def close(self) -> None:
        self.log.append("close")


REQUEST = Generate(request_id="a", prompt=[1], params=SamplingParams())


def in_a_process(part: Callable[[], None]) -> str:
    """What `part` prints in a process of its own, as a worker ends its process with its socket."""
    done = subprocess.run([sys.executable, __file__, part.__name__], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_worker_tells_what_a_step_gave_gives_way_and_hears_what_came_before_it_plans_the_next() -> None:
    assert in_a_process(hear).split() == ["add", "start", "finish", "give-way", "abort"]


def hear() -> None:
    ours, theirs = socket.socketpair()

    def meanwhile() -> None:
        for message in (Abort("a"), Drain()):
            wire.send(theirs, message)
        while inbox._messages.qsize() < 2:
            time.sleep(0)

    engine = Notebook(meanwhile)
    inbox = Inbox(ours)
    worker = Worker(engine, functools.partial(wire.send, ours), inbox)
    wire.send(theirs, REQUEST)
    worker.run()
    print(*engine.log, flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_waits_for_messages_is_not_woken_when_the_other_end_takes_one() -> None:
    assert int(in_a_process(tell_much)) < 10


def tell_much() -> None:
    ours, theirs = socket.socketpair()
    before = set(os.listdir("/proc/self/task"))
    Inbox(ours)
    (inbox,) = set(os.listdir("/proc/self/task")) - before

    def times_slept() -> int:
        status = Path(f"/proc/self/task/{inbox}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    slept = times_slept()
    for _ in range(200):
        wire.send(ours, StepOutput([]))
        assert wire.receive(theirs)
        time.sleep(0.0005)  # long enough to be woken and to sleep again
    print(times_slept() - slept, flush=True)


def test_an_engines_thread_does_what_came_during_a_step_before_it_plans_the_next() -> None:
    aborted = threading.Event()

    def meanwhile() -> None:
        thread.call(lambda engine: engine.abort("a")).add_done_callback(lambda _: aborted.set())

    engine = Notebook(meanwhile)
    thread = EngineThread(engine)  # type: ignore[arg-type]
    thread.call(lambda engine: engine.add(REQUEST))
    assert aborted.wait(PATIENCE)
    thread.close()
    assert engine.log[:4] == ["add", "start", "finish", "abort"]
    assert engine.log[-1] == "close"


if __name__ == "__main__":
    {part.__name__: part for part in (hear, tell_much)}[sys.argv[1]]()
