"""One turn: a setup's workers are started, warmed up, and given a demand."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.cluster.local import Cluster
from tokenmill.cluster.separation import SeparationPolicy
from tokenmill.core.errors import TokenmillError
from tokenmill.core.messages import EngineInfo, Generate
from tokenmill.measure.separation.demand import Demand
from tokenmill.measure.separation.setups import Setup
from tokenmill.measure.serving import Record
from tokenmill.measure.targets import now

STATS_SECONDS = 30.0
STOP_SECONDS = 10.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Asked:
    """A request, what became of it, and the answer so far."""

    generate: Generate
    record: Record
    long: bool
    tokens: list[int] = field(default_factory=list)


class Transfers(NamedTuple):
    """Of KV frames in a turn. prompts: handed over. waited: seconds between the news of the ends of their prompts, on the decode worker,
    and when their last frames had come. exposed: by prompt, as `PDMetrics` has it."""

    prompts: int
    reads: int
    nbytes: int
    seconds: float
    waited: float
    exposed: Sequence[float]


@dataclass
class Turn:
    """start, until: of what counts: from when all streams decode until all long prompts are answered and the time in which they arrive
    is over. gateway_seconds, worker_seconds: of CPUs in that time, of this process (clients, load and gateway) and of the workers.
    """

    demand: Demand
    asked: list[Asked]
    start: float
    until: float
    gateway_seconds: float
    worker_seconds: float
    transfers: Transfers | None

    @property
    def seconds(self) -> float:
        return self.until - self.start

    @property
    def stream_gaps(self) -> list[float]:
        """Between tokens of streams, if they began in what counts."""
        return [gap for asked in self.asked if not asked.long for gap in self.gaps(asked)]

    def gaps(self, asked: Asked) -> list[float]:
        return [later - earlier for earlier, later in pairwise(asked.record.times) if self.start <= earlier < self.until]


async def take_turn(setup: Setup, demand: Demand) -> tuple[Turn, EngineInfo]:
    """Raises the error of a request that fails, and `TokenmillError` if a worker was lost meanwhile."""
    cluster = Cluster(setup.config, setup.plans, separation=SeparationPolicy(always=True))
    try:
        await cluster.start()
        await asyncio.gather(*(_follow(cluster, Asked(each, Record(now()), False)) for each in demand.warm_up()))
        return await _measure(cluster, setup, demand), cluster.info
    finally:
        await cluster.stop(STOP_SECONDS)


async def _measure(cluster: Cluster, setup: Setup, demand: Demand) -> Turn:
    asked: list[Asked] = []
    decoding = [asyncio.Event() for _ in range(demand.streams)]
    before, known = await _handed_over(cluster), len(cluster.metrics.kv_transfer_exposed_ms)
    clients = [asyncio.create_task(_client(cluster, demand.stream(number), asked, event)) for number, event in enumerate(decoding)]
    ready = asyncio.gather(*(event.wait() for event in decoding))
    try:
        await _unless_failed(ready, clients)
        pids = [info.pid for info in cluster.workers.values()]
        start, own, others = now(), time.process_time(), _cpu_seconds(pids)
        long = [Asked(demand.long(number), Record(start + at), True) for number, at in enumerate(demand.arrivals())]
        asked += long
        answers = asyncio.gather(*(_at_its_time(cluster, each) for each in long), asyncio.sleep(demand.seconds))
        await _unless_failed(answers, clients)
        if cluster.restarts or pids != [info.pid for info in cluster.workers.values()]:
            raise TokenmillError(f"{setup.name}: a worker ended while it was measured: its log says why")
        until, own, others = now(), time.process_time() - own, _cpu_seconds(pids) - others
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    transfers = None
    if setup.separated:
        after = await _handed_over(cluster)
        exposed = [ms / 1e3 for ms in list(cluster.metrics.kv_transfer_exposed_ms)[known:]]
        changes = [later - earlier for later, earlier in zip(after, before, strict=True)]
        transfers = Transfers(len(exposed), int(changes[0]), int(changes[1]), changes[2], changes[3], exposed)
    return Turn(demand, asked, start, until, own, others, transfers)


async def _unless_failed(wanted: asyncio.Future[Any], clients: Sequence[asyncio.Task[None]]) -> None:
    """Wait for it; clients go on for ever, so that one that ends has failed. Raises the error of either."""
    try:
        done, _ = await asyncio.wait([wanted, *clients], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        wanted.cancel()
        await asyncio.gather(wanted, return_exceptions=True)


async def _client(cluster: Cluster, requests: Iterator[Generate], asked: list[Asked], decoding: asyncio.Event) -> None:
    for generate in requests:
        each = Asked(generate, Record(now()), False)
        asked.append(each)
        await _follow(cluster, each, decoding)


async def _at_its_time(cluster: Cluster, asked: Asked) -> None:
    await asyncio.sleep(asked.record.scheduled - now())
    await _follow(cluster, asked)


async def _follow(cluster: Cluster, asked: Asked, decoding: asyncio.Event | None = None) -> None:
    """decoding: is set at the second token."""
    record = asked.record
    record.sent, record.prompt_tokens = now(), len(asked.generate.prompt)
    async with aclosing(cluster.generate(asked.generate)) as outputs:
        async for output in outputs:
            if output.tokens:
                record.times.append(now())
                asked.tokens += output.tokens
            if decoding is not None and len(record.times) > 1:
                decoding.set()
    record.output_tokens = len(asked.tokens)
    record.ended = now()


async def _handed_over(cluster: Cluster) -> tuple[float, float, float, float]:
    """Reads, their bytes and seconds, and seconds that were waited, over all workers since their start."""
    handovers = [engine.stats.handover for engine in await cluster.stats(STATS_SECONDS) if engine.stats.handover is not None]
    return (
        sum(each.reads for each in handovers),
        sum(each.read_bytes for each in handovers),
        sum(each.read_seconds for each in handovers),
        sum(each.waited_seconds for each in handovers),
    )


def _cpu_seconds(pids: Sequence[int]) -> float:
    """That processes have used. Linux."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(of[11]) + int(of[12]) for of in fields) / CLOCK_TICKS


def check_answers(turns: Sequence[tuple[str, Turn]]) -> None:
    """Turns of several setups for the same demand, by the setup's name. Raises `TokenmillError` where answers differ; streams are
    compared as far as they go."""
    known: dict[str, tuple[str, list[int]]] = {}
    for name, turn in turns:
        for asked in turn.asked:
            request = asked.generate.request_id
            other, expected = known.setdefault(request, (name, asked.tokens))
            length = min(len(asked.tokens), len(expected))
            at = next((i for i in range(length) if asked.tokens[i] != expected[i]), length)
            if at < length or (asked.long and len(asked.tokens) != len(expected)):
                raise TokenmillError(
                    f"{name} and {other} gave different answers to {request}: from token {at} on it is {asked.tokens[at : at + 4]} instead "
                    f"of {expected[at : at + 4]}"
                )
            if len(asked.tokens) > len(expected):
                known[request] = name, asked.tokens
