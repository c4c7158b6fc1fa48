"""Single faults, one after the other, that real servers have met."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from leftovers import settle
from lived import Lived
from place import PATIENCE, Place
from watch import WITHIN

SIZES = ("--max-model-len", "1800", "--kv-memory-gb", "0.3", "--shutdown-timeout", "60")


@pytest.fixture
async def lived() -> AsyncIterator[Lived]:
    clock = Lived()
    living = asyncio.create_task(clock.run())
    yield clock
    living.cancel()


@pytest.fixture
async def pair(tmp_path: Path, smollm2_path: Path, lived: Lived) -> AsyncIterator[Place]:
    """A prefill and a decode worker of one host."""
    place = Place(tmp_path, smollm2_path, lived, (*SIZES, "--prefill", "1", "--decode", "1"))
    try:
        await place.open("prefill-0", "decode-0")
        yield place
        assert await place.close() == 0
        assert place.pids() == []
    finally:
        place.kill()


async def ask(place: Place, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=place.url, timeout=None) as http:
        return await http.post("/v1/completions", json={"model": "m", "temperature": 0} | fields)


async def test_health_tells_that_who_answers_is_stopped_and_that_it_goes_on(pair: Place) -> None:
    """And the answer that it had begun is what it would have been."""
    asked: dict[str, Any] = {"prompt": [5, 6, 7, 8], "max_tokens": 400, "ignore_eos": True}
    expected = (await ask(pair, **asked)).json()["choices"]
    pid = (await pair.look()).workers["decode-0"]["pid"]
    asking = asyncio.create_task(ask(pair, **asked))

    async def runs() -> bool:
        return bool((await pair.look()).workers["decode-0"]["running"])

    def told(health: int, state: str) -> Callable[[], Awaitable[bool]]:
        async def is_told() -> bool:
            look = await pair.look()
            return (look.health, look.workers["decode-0"]["state"]) == (health, state)

        return is_told

    assert await pair.lived.until(runs, PATIENCE)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert await pair.lived.until(told(503, "unhealthy"), WITHIN + 2)
        assert (await ask(pair, **asked)).json()["error"]["code"] == "unavailable"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await pair.lived.until(told(200, "healthy"), WITHIN)
    assert (await asking).json()["choices"] == expected


async def test_the_pool_of_a_worker_that_was_killed_is_let_go_of_by_who_had_read_from_it(pair: Place) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(ask(pair, prompt=[number, *range(1, 500)], max_tokens=20))
    assert "kv_transfer_chunks_total" in await pair.metrics()
    before = (await pair.look()).workers["prefill-0"]["pid"]
    os.kill(before, signal.SIGKILL)
    await settle(pair)
    assert (await pair.look()).workers["prefill-0"]["pid"] != before
