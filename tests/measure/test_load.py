from __future__ import annotations

import asyncio
import itertools

import pytest

from tokenmill.measure.load import Load
from tokenmill.measure.serving import Record
from tokenmill.measure.targets import now
from tokenmill.measure.workload import Ask


class Server:
    """Answers when it is let; keeps how many requests were with it at a time."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.arrived = asyncio.Semaphore(0)
        self.running = self.most = 0

    async def send(self, ask: Ask, record: Record) -> None:
        record.sent = now()
        self.running += 1
        self.most = max(self.most, self.running)
        self.arrived.release()
        await self.let.wait()
        await asyncio.sleep(0)
        self.running -= 1
        record.times.append(now())
        record.ended = now()


def asks(*times: float) -> list[Ask]:
    return [Ask("x", 1, at) for at in times]


async def test_an_open_loop_sends_on_time_though_nothing_is_answered() -> None:
    server, load = Server(), Load(requests=None, duration=1.0)
    task = asyncio.create_task(load.open_loop(server, asks(0.0, 0.0, 0.01, 0.02, 2.0)))
    for _ in range(4):
        await asyncio.wait_for(server.arrived.acquire(), 5)
    assert server.most == 4
    assert not any(record.times for record in load.records)
    server.let.set()
    await task
    assert len(load.records) == 4  # the fifth was to come after the end
    at = [record.scheduled - load.records[0].scheduled for record in load.records]
    assert at == pytest.approx([0.0, 0.0, 0.01, 0.02])
    assert load.records[-1].ttft == pytest.approx(load.records[-1].times[0] - load.records[-1].scheduled)


async def test_a_closed_loop_keeps_its_number_of_clients_busy_and_no_more() -> None:
    server, load = Server(), Load(requests=7, duration=None)
    task = asyncio.create_task(load.closed_loop(server, asks(*itertools.repeat(0.0, 50)), 3))
    for _ in range(3):
        await asyncio.wait_for(server.arrived.acquire(), 5)
    await asyncio.sleep(0)
    assert server.running == 3
    server.let.set()
    await task
    assert (server.most, len(load.records)) == (3, 7)
    assert all(record.ended for record in load.records)


async def test_a_closed_loop_begins_nothing_after_its_duration() -> None:
    server, load = Server(), Load(requests=None, duration=0.05)
    server.let.set()
    await asyncio.wait_for(load.closed_loop(server, (Ask("x", 1) for _ in itertools.count()), 2), 5)
    assert load.records
    assert max(record.scheduled for record in load.records) - load.records[0].scheduled < 0.06


async def test_what_was_seen_is_there_when_a_run_is_cut_short() -> None:
    server, load = Server(), Load(requests=3, duration=None)
    task = asyncio.create_task(load.open_loop(server, asks(0.0, 0.0, 99.0)))
    await asyncio.wait_for(server.arrived.acquire(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(load.records) == 2
    assert 0 < load.seconds < 50


async def test_seconds_end_with_the_last_answer() -> None:
    server, load = Server(), Load(requests=1, duration=None)
    server.let.set()
    await load.open_loop(server, asks(0.0))
    once = load.seconds
    await asyncio.sleep(0.01)
    assert load.seconds == once
