"""Real servers under random faults and random clients. Every accepted request ends once, with the answer of an engine that nobody disturbs
or with an error that says so; what a server says of itself is true within ten seconds; and afterwards nothing is left.

`pytest -m heavy tests/chaos` is thirty minutes of it for each setup; TOKENMILL_CHAOS_SECONDS and TOKENMILL_CHAOS_SEED are for others.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from clients import Clients
from faults import JOINED, LOCAL, NETWORK, STORE, Monkey
from leftovers import census, count, faults_told, settle
from lived import Lived
from network import Network, Unavailable
from place import PATIENCE, Place
from questions import CONTEXT, Question, draw_questions
from store_servers import Server
from watch import Watch

from tokenmill.core.roles import Role

SIZES = ("--max-model-len", str(CONTEXT), "--kv-memory-gb")
GUEST = (*SIZES, "0.15", "--threads", "1", "--shutdown-timeout", "60")
OWN = ("prefill-0", "decode-0", "decode-1")
SERVE = (*SIZES, "0.4", "--prefill", "1", "--decode", "2", "--shutdown-timeout", "60")

Faults = Sequence[Callable[[Monkey], Awaitable[None]]]


# A client that is cancelled while it connects to a gateway that has just been killed can leave its own socket to the collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def questions(smollm2_path: Path) -> list[Question]:
    return draw_questions(smollm2_path, seed=1, count=48)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        found = Network(seed=1)
    except Unavailable as why:
        pytest.skip(f"there can be no network of namespaces here: {why}")
    yield found
    found.close()


def drawn_seed() -> int:
    seed = int(os.environ.get("TOKENMILL_CHAOS_SEED", random.randrange(10**6)))
    print(f"TOKENMILL_CHAOS_SEED={seed}")
    return seed


def duration(seconds: float) -> float:
    return float(os.environ.get("TOKENMILL_CHAOS_SECONDS", seconds))


async def endure(
    place: Place, questions: Sequence[Question], faults: Faults, seed: int, seconds: float, pause: float, store: Server | None
) -> None:
    """Strike a place while clients ask, and see that it is as it was before."""
    await settle(place)
    await place.hang_up()
    before = census(place)
    clients = Clients(place.url, questions, seed, place.lived)
    watch = Watch(place)
    monkey = Monkey(place, clients, watch, seed, GUEST, store)
    asking = asyncio.create_task(clients.run())
    watching = asyncio.create_task(watch.run())
    striking = asyncio.create_task(monkey.run(faults, pause))
    try:
        await place.lived.sleep(seconds)
        striking.cancel()
        await asyncio.wait({striking})
        if not striking.cancelled():
            striking.result()
        clients.stop()
        await asking
        await settle(place)
        watching.cancel()
        await asyncio.wait({watching})
        if not watching.cancelled():
            watching.result()
        await place.hang_up()
        after: dict[str, int] = {}

        async def as_before() -> bool:
            after.clear()
            after.update(census(place))
            return all(number <= before.get(kind, 0) for kind, number in after.items())

        assert await place.lived.until(as_before, 30), f"before: {before}, now: {after}"
        metrics = await place.metrics()
        handovers = count(metrics, "kv_transfer_time_seconds_count")
        fetched = count(metrics, "kv_store_fetched_tokens_total")
        print(f"seed {seed}: {dict(clients.counts)}, {len(monkey.journal)} notes, {watch.looks} looks; of the last processes: "
              f"{handovers:.0f} hand-overs, {fetched:.0f} tokens from the store")  # fmt: skip
        await part(place)
        assert (clients.wrongs, watch.lies, faults_told(place)) == ([], [], [])
        assert clients.counts["right"] > 5
    except BaseException:
        print("\n".join([f"seed {seed}", *monkey.journal, *clients.wrongs, *watch.lies, str(clients.counts)]))
        raise
    finally:
        for task in (asking, watching, striking):
            task.cancel()
        await asyncio.gather(asking, watching, striking, return_exceptions=True)


async def part(place: Place) -> None:
    """Workers of the gateway's host end when they are removed, of whom it believes that they have nothing to do."""
    for name in sorted(place.expected - set(place.guests), reverse=True)[:-1]:
        answer = await place.lived.within(PATIENCE, place.tell("remove", name))
        only = "is the only one that answers" in answer.text
        assert answer.status_code == 200 or only, answer.text


class Setup(NamedTuple):
    """own: workers of the gateway. guests: those that join."""

    faults: Faults
    own: tuple[str, ...] = ()
    guests: tuple[Role, ...] = ()


LOCAL_WORKERS = Setup(LOCAL, own=OWN)
GUESTS = (Role.PREFILL, Role.DECODE, Role.DECODE)
JOINED_WORKERS = Setup(JOINED, guests=GUESTS)
WORKERS_ON_HOSTS = Setup((*JOINED, *NETWORK), guests=GUESTS)
GATEWAYS: Faults = (Monkey.kill_the_gateway,)


async def chaos(
    folder: Path,
    model: Path,
    questions: Sequence[Question],
    setup: Setup,
    seconds: float,
    pause: float,
    network: Network | None = None,
    store: Server | None = None,
) -> None:
    seed, lived = drawn_seed(), Lived()
    living = asyncio.create_task(lived.run())
    serve = SERVE if setup.own else (*SIZES, "0.4")
    place = Place(folder, model, lived, serve if store is None else (*serve, "--kv-store", store.url), network)
    try:
        await place.open(*setup.own, listens=bool(setup.guests))
        for number, role in enumerate(setup.guests):
            place.join(f"{role}-{number}", role, *GUEST)
        await endure(place, questions, setup.faults, seed, duration(seconds), pause, store)
        assert await place.close() == 0
        assert place.pids() == []
        assert not faults_told(place), "\n".join(faults_told(place))
    except BaseException:
        for name, log in place.logs().items():
            print(f"--- {name}\n{log[-8000:]}")
        raise
    finally:
        place.kill()
        living.cancel()


@pytest.mark.parametrize(("setup", "seconds"), [(LOCAL_WORKERS, 10), (JOINED_WORKERS, 6)], ids=["of this host", "that have joined"])
async def test_a_short_while(tmp_path: Path, smollm2_path: Path, questions: list[Question], setup: Setup, seconds: float) -> None:
    await chaos(tmp_path, smollm2_path, questions[:24], setup, seconds, pause=1.0)


@pytest.mark.heavy
@pytest.mark.parametrize("gateways", [False, True], ids=["", "and gateways that are killed"])
@pytest.mark.parametrize("setup", [LOCAL_WORKERS, JOINED_WORKERS], ids=["workers of this host", "workers that have joined"])
async def test_half_an_hour(tmp_path: Path, smollm2_path: Path, questions: list[Question], setup: Setup, gateways: bool) -> None:
    setup = setup._replace(faults=(*setup.faults, *(GATEWAYS if gateways else ())))
    await chaos(tmp_path, smollm2_path, questions, setup, seconds=1800, pause=4.0)


@pytest.mark.heavy
async def test_half_an_hour_on_a_network(tmp_path: Path, smollm2_path: Path, questions: list[Question], network: Network) -> None:
    setup = WORKERS_ON_HOSTS._replace(faults=(*WORKERS_ON_HOSTS.faults, *GATEWAYS))
    await chaos(tmp_path, smollm2_path, questions, setup, seconds=1800, pause=4.0, network=network)


@pytest.mark.heavy
async def test_half_an_hour_with_a_store(tmp_path: Path, smollm2_path: Path, questions: list[Question]) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    setup = LOCAL_WORKERS._replace(faults=(*LOCAL, *STORE, *STORE))
    with Server(folder, "maxmemory 200mb", "maxmemory-policy allkeys-lru") as store:
        await chaos(tmp_path, smollm2_path, questions, setup, seconds=1800, pause=2.0, store=store)
