"""What happens to processes and networks: each fault is one coroutine that ends when it is over, and draws what is random."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence

import httpx
import valkey
from clients import Clients
from lived import Lived
from network import CUT, FAIR, Weather
from place import Place
from store_servers import Server
from watch import Watch

LONGEST_STOP = 15.0


class Monkey:
    """Strikes a place. journal: what was done, and when."""

    def __init__(
        self, place: Place, clients: Clients, watch: Watch, seed: int, guest_options: Sequence[str] = (), store: Server | None = None
    ) -> None:
        """guest_options: of workers that join. store: the server of the place's KV store."""
        self._place = place
        self._clients = clients
        self._watch = watch
        self._rng = random.Random(seed)
        self._guest_options = guest_options
        self._store = store
        self._store_is_there = True
        self._stopped: set[int] = set()
        self._newcomers = 0
        self.journal: list[str] = []

    async def run(self, faults: Sequence[Callable[[Monkey], Awaitable[None]]], pause: float) -> None:
        """One fault after the other, each `pause` seconds after the one before on average, whether that is over or not; until cancelled."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self.lived.sleep(self._rng.expovariate(1 / pause))
                task = asyncio.ensure_future(self._strike(self._rng.choice(faults)))
                running.add(task)
                task.add_done_callback(running.discard)
                await asyncio.sleep(0)
        finally:
            # They are let come to their end, so that nobody is left stopped or cut off.
            for found in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(found, Exception):
                    raise found

    async def _strike(self, fault: Callable[[Monkey], Awaitable[None]]) -> None:
        with contextlib.suppress(ProcessLookupError, httpx.TransportError):  # somebody else was quicker
            await fault(self)

    @property
    def lived(self) -> Lived:
        return self._place.lived

    # Processes

    async def kill_a_worker(self) -> None:
        name, pid = await self._any_worker()
        self._note(f"kill {name}")
        if name in self._place.guests:
            guest = self._place.guests[name]
            guest.process.kill()
            await self.lived.sleep(self._rng.uniform(0, 4))
            guest.process.wait()
            if self._place.guests.get(name) is guest:
                self._place.join(name, guest.role, *self._guest_options)
        else:
            os.kill(pid, signal.SIGKILL)

    async def kill_the_nursery(self) -> None:
        if (pid := self._place.nursery_pid) is not None:
            self._note("kill the nursery")
            os.kill(pid, signal.SIGKILL)

    async def stop_a_worker(self) -> None:
        name, pid = await self._any_worker()
        await self._stop(name, pid)

    async def stop_the_nursery(self) -> None:
        """And kill a worker, which is to be forked by it."""
        if (pid := self._place.nursery_pid) is not None:
            stopping = asyncio.ensure_future(self._stop("the nursery", pid))
            await asyncio.sleep(0)
            await self.kill_a_worker()
            await stopping

    async def stop_the_gateway(self) -> None:
        await self._stop("the gateway", self._place.gateway_pid)

    async def kill_the_gateway(self) -> None:
        """Nothing is left of it, nor of what it had started; then it is there again."""
        place = self._place
        if place.gateway_pid in self._stopped:
            return
        self._note("kill the gateway")
        self._clients.ends += 1
        self._clients.is_there.clear()
        own = set(place.pids()) - {guest.process.pid for guest in place.guests.values()}
        await place.reopen()
        self._clients.is_there.set()

        async def nothing_left() -> bool:
            return not own & set(place.pids())

        for pid in own & self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert await self.lived.until(nothing_left, 20), f"the gateway was killed, but {own & set(place.pids())} live"
        self._note("the gateway is there again")

    async def _stop(self, name: str, pid: int) -> None:
        if pid in self._stopped:
            return
        seconds = self._rng.choice((self._rng.uniform(0.5, 3), self._rng.uniform(0.5, LONGEST_STOP)))
        self._note(f"stop {name} for {seconds:.1f} s")
        self._stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        try:
            await self.lived.sleep(seconds)
        finally:
            self._stopped.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._note(f"{name} goes on")

    # By those who run the place

    async def migrate(self) -> None:
        name, _ = await self._any_worker()
        self._note(f"migrate {name}")
        await self._place.tell("migrate", name)

    async def remove_a_worker(self) -> None:
        """Of this host; the last that answers is not to be had."""
        name, _ = await self._any_worker()
        if name in self._place.guests:
            return
        self._note(f"remove {name}")
        before = self._place.gateway_pid
        answer = await self._place.tell("remove", name)
        if answer.status_code == 200 and self._place.gateway_pid == before:
            self._place.expected.discard(name)
            self._note(f"{name} is removed")

    async def part_from_a_guest(self) -> None:
        """It ends in order, and another one joins, under another name."""
        place = self._place
        guests = [guest for guest in place.guests.values() if guest.process.pid not in self._stopped]
        guest = self._rng.choice(guests)
        self._newcomers += 1
        newcomer = f"{guest.role}-n{self._newcomers}"
        self._note(f"{guest.name} leaves, {newcomer} joins")
        place.join(newcomer, guest.role, *self._guest_options)
        await place.part(guest.name, signal.SIGTERM)

    # Networks

    async def cut_off_a_guest(self) -> None:
        """From the gateway."""
        name = self._any_guest()
        seconds = self._rng.choice((self._rng.uniform(0.2, 5), self._rng.uniform(5, 30)))
        # What waits to be sent again is sent after another time as long at most; else the connection ends, and the worker comes again.
        self._watch.unreachable[name] = self.lived.now() + 2 * seconds + 10
        await self._weather(name, "gateway", CUT, seconds)

    async def cut_two_guests_from_each_other(self) -> None:
        guests = list(self._place.guests)
        if len(guests) > 1:
            one, other = self._rng.sample(guests, 2)
            await self._weather(one, other, CUT, self._rng.uniform(0.5, 15))

    async def trouble_the_network(self) -> None:
        one, other = self._rng.sample([*self._place.guests, "gateway"], 2)
        delay, jitter = self._rng.uniform(0, 0.3), self._rng.uniform(0, 0.2)
        await self._weather(one, other, Weather(delay, jitter, self._rng.choice((0, 0.02, 0.1))), self._rng.uniform(1, 10))

    async def _weather(self, one: str, other: str, weather: Weather, seconds: float) -> None:
        network = self._place.network
        assert network is not None
        self._note(f"{one} - {other}: {weather} for {seconds:.1f} s")
        network.weather(one, other, weather)
        await self.lived.sleep(seconds)
        network.weather(one, other, FAIR)

    # The KV store

    async def kill_the_store(self) -> None:
        """With all that it has; another one is there after a while."""
        store = self._store
        assert store is not None
        if not self._store_is_there:
            return
        self._note("kill the store")
        self._store_is_there = False
        store.kill()
        await self.lived.sleep(self._rng.uniform(0, 5))
        await asyncio.to_thread(store.start)
        self._store_is_there = True

    async def stop_the_store(self) -> None:
        assert self._store is not None
        if self._store_is_there:
            await self._stop("the store", self._store.pid)

    async def spoil_the_store(self) -> None:
        """Some bytes of some of its entries are others, some entries are cut off, are longer, or those of others."""
        assert self._store is not None
        if not self._store_is_there or self._store.pid in self._stopped:
            return
        self._note("spoil the store")
        await asyncio.to_thread(_spoil, self._store, random.Random(self._rng.random()))

    def _any_guest(self) -> str:
        return self._rng.choice(list(self._place.guests))

    async def _any_worker(self) -> tuple[str, int]:
        """Name and process of one that is there."""
        while True:
            workers = (await self._place.look()).workers
            there = [(name, worker["pid"]) for name, worker in workers.items() if worker.get("pid")]
            if there:
                return self._rng.choice(there)
            await self.lived.sleep(0.1)

    def _note(self, what: str) -> None:
        self.journal.append(f"[{self.lived.now():.1f}] {what}")


def _spoil(store: Server, rng: random.Random) -> None:
    with contextlib.suppress(valkey.ConnectionError, valkey.TimeoutError), store.client(socket_timeout=5) as client:
        names = sorted(client.scan_iter("tokenmill:kv:*", count=1000))
        for name in rng.sample(names, len(names) // 3):
            entry = bytearray(client.get(name) or b"?")
            match rng.randrange(5):
                case 0:
                    entry[rng.randrange(min(96, len(entry)))] ^= 1 << rng.randrange(8)  # of its head
                case 1:
                    for _ in range(rng.randrange(1, 9)):
                        entry[rng.randrange(len(entry))] = rng.randrange(256)
                case 2:
                    del entry[rng.randrange(len(entry)) :]
                case 3:
                    entry += rng.randbytes(rng.randrange(1, 100))
                case 4:
                    entry = bytearray(client.get(rng.choice(names)) or b"")
            client.set(name, bytes(entry), keepttl=True)


LOCAL = (
    *(3 * [Monkey.kill_a_worker]),
    *(3 * [Monkey.stop_a_worker]),
    *(2 * [Monkey.migrate]),
    Monkey.kill_the_nursery,
    Monkey.stop_the_nursery,
    Monkey.stop_the_gateway,
    Monkey.remove_a_worker,
)
JOINED = (
    *(2 * [Monkey.kill_a_worker]),
    *(3 * [Monkey.stop_a_worker]),
    *(2 * [Monkey.migrate]),
    *(2 * [Monkey.part_from_a_guest]),
    Monkey.stop_the_gateway,
)
NETWORK = (*(2 * [Monkey.cut_off_a_guest]), *(2 * [Monkey.cut_two_guests_from_each_other]), *(2 * [Monkey.trouble_the_network]))
STORE = (Monkey.kill_the_store, Monkey.stop_the_store, *(3 * [Monkey.spoil_the_store]))
