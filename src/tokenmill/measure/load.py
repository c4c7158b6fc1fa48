"""Puts a load on a target. What has been seen so far can be read at any time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator

from tokenmill.measure.serving import Record
from tokenmill.measure.targets import Target, now
from tokenmill.measure.workload import Ask


class Load:
    """One run. requests: most requests; duration: seconds after which none begins any more; None for no bound."""

    def __init__(self, requests: int | None, duration: float | None) -> None:
        assert requests is not None or duration is not None, "a load without an end"
        self.records: list[Record] = []
        self._requests, self._duration = requests, duration
        self._start = now()

    @property
    def seconds(self) -> float:
        """From the start to the last answer's end, or until now while some are on their way."""
        ends = [record.ended for record in self.records if record.ended is not None]
        last = max(ends) if ends and len(ends) == len(self.records) else now()
        return last - self._start

    async def open_loop(self, target: Target, asks: Iterable[Ask]) -> None:
        """Send each request at its time, whatever has become of the earlier ones."""
        self._start = now()
        async with asyncio.TaskGroup() as group:
            for ask in self._bounded(asks):
                record = Record(self._start + ask.at)
                await asyncio.sleep(record.scheduled - now())
                self.records.append(record)
                group.create_task(target.send(ask, record))

    async def closed_loop(self, target: Target, asks: Iterable[Ask], concurrency: int) -> None:
        """Keep `concurrency` requests on their way: one that ends is followed by the next."""
        self._start = now()
        queue = self._bounded(asks)

        async def client() -> None:
            for ask in queue:
                record = Record(now())
                self.records.append(record)
                await target.send(ask, record)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    def _bounded(self, asks: Iterable[Ask]) -> Iterator[Ask]:
        duration = self._duration
        if duration is not None:
            asks = itertools.takewhile(lambda ask: ask.at < duration and now() < self._start + duration, asks)
        return itertools.islice(asks, self._requests)
