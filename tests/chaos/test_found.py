"""Single faults, one after the other, that real servers have met."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from leftovers import settle
from lived import Lived
from place import Place

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


async def test_the_pool_of_a_worker_that_was_killed_is_let_go_of_by_who_had_read_from_it(pair: Place) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(ask(pair, prompt=[number, *range(1, 500)], max_tokens=20))
    assert "kv_transfer_chunks_total" in await pair.metrics()
    before = (await pair.look()).workers["prefill-0"]["pid"]
    os.kill(before, signal.SIGKILL)
    await settle(pair)
    assert (await pair.look()).workers["prefill-0"]["pid"] != before
