"""Time in which this process, and with it what it watches, has really run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

TICK = 0.05

LONGEST_TICK = 0.5
"""Seconds that count of one tick: whoever was stopped for minutes, by a debugger or a machine that suspends, has not waited for anybody."""

T = TypeVar("T")


class Lived:
    """A clock that stands still while this process does. `run` keeps it going."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        return self._seconds

    async def run(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            self._seconds += min(now - before, LONGEST_TICK)
            before = now

    async def sleep(self, seconds: float) -> None:
        until = self._seconds + seconds
        while self._seconds < until:
            await asyncio.sleep(min(TICK, until - self._seconds))

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        """Whether it came true in so many."""
        deadline = self._seconds + seconds
        while not await condition():
            if self._seconds > deadline:
                return False
            await asyncio.sleep(TICK)
        return True

    async def within(self, seconds: float, work: Awaitable[T]) -> T:
        """Raises TimeoutError, and then has cancelled it."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.create_task(self.sleep(seconds))
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise TimeoutError
            return working.result()
        finally:
            for task in (working, waiting):
                task.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)
