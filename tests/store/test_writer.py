from __future__ import annotations

import concurrent.futures
import random
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from store_blocks import SCOPE, entry, key, label, payload
from store_servers import LONG

from tokenmill.core.clock import ManualClock
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.entry import Data, Label
from tokenmill.transfer.store.writer import Writer, WriterPolicy


class Shelf:
    """What a writer puts into: a dict behind a gate."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.batches: list[list[bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.takes: Callable[[bytes], bool] = lambda key: True

    def put(self, entries: Sequence[tuple[bytes, Data]]) -> list[bool]:
        self.entered.set()
        assert self.gate.wait(LONG)
        self.batches.append([of for of, _ in entries])
        taken = [self.takes(of) for of, _ in entries]
        self.entries |= {of: bytes(data) for (of, data), there in zip(entries, taken, strict=True) if there}
        return taken


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Maker:
    """Writers of a test, which end with it."""

    def __init__(self, shelf: Shelf, counts: Counts, clock: ManualClock) -> None:
        self._parts = shelf, counts, clock
        self._made: list[Writer] = []

    def __call__(self, **policy: int | float) -> Writer:
        shelf, counts, clock = self._parts
        self._made.append(Writer(shelf.put, counts, WriterPolicy(**policy), clock))  # type: ignore[arg-type]
        return self._made[-1]

    def close(self) -> None:
        self._parts[0].gate.set()
        for writer in self._made:
            writer.close(LONG)


@pytest.fixture
def writer(shelf: Shelf, counts: Counts, clock: ManualClock) -> Iterator[Maker]:
    maker = Maker(shelf, counts, clock)
    yield maker
    maker.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-store")]


def test_what_was_offered_is_stored_in_order_in_its_envelope(writer: Maker, shelf: Shelf, counts: Counts) -> None:
    writing = writer()
    assert all(writing.offer(label(number), payload(number)) for number in range(20))
    assert writing.flush(LONG)
    assert shelf.entries == {key(number): entry(number) for number in range(20)}
    assert [of for batch in shelf.batches for of in batch] == [key(number) for number in range(20)]
    assert (counts[Count.OFFERED], counts[Count.WRITTEN], counts[Count.WRITTEN_BYTES]) == (20, 20, 20_000)


def test_a_queue_that_is_full_drops_the_newest_and_blocks_nobody(writer: Maker, shelf: Shelf, counts: Counts) -> None:
    writing = writer(queued=5000)
    shelf.gate.clear()
    taken = [writing.offer(label(number), payload(number)) for number in range(8)]
    assert taken == [True] * 5 + [False] * 3
    assert not writing.wants(key(9), 1)
    assert counts[Count.DROPPED] == 4
    assert not writing.flush(0.01)
    shelf.gate.set()
    assert writing.flush(LONG)
    assert writing.wants(key(9), 5000)
    assert not writing.wants(key(9), 5001)
    assert writing.offer(label(7), payload(7))
    assert writing.flush(LONG)
    assert set(shelf.entries) == {key(number) for number in (0, 1, 2, 3, 4, 7)}


def test_what_is_being_put_counts_as_queued(writer: Maker, shelf: Shelf) -> None:
    writing = writer(queued=2000)
    shelf.gate.clear()
    assert writing.offer(label(0), payload(0))
    assert shelf.entered.wait(LONG)
    assert not writing.wants(key(1), 1001)
    assert writing.wants(key(1), 1000)


def test_nothing_is_stored_twice_as_long_as_that_is_known(writer: Maker, shelf: Shelf, counts: Counts, clock: ManualClock) -> None:
    writing = writer(known_for=100)
    shelf.gate.clear()
    assert writing.offer(label(0), payload(0))
    assert not writing.offer(label(0), payload(0)), "it is queued"
    shelf.gate.set()
    assert writing.flush(LONG)
    assert not writing.wants(key(0), 1000)
    assert counts[Count.KNOWN] == 2
    clock.advance(99.9)
    assert not writing.wants(key(0), 1000)
    clock.advance(0.1)
    assert writing.wants(key(0), 1000)


def test_what_could_not_be_stored_or_is_forgotten_is_not_known(writer: Maker, shelf: Shelf, counts: Counts) -> None:
    writing = writer()
    shelf.takes = lambda of: of != key(1)
    for number in range(3):
        writing.offer(label(number), payload(number))
    assert writing.flush(LONG)
    assert [writing.wants(key(number), 1) for number in range(3)] == [False, True, False]
    assert (counts[Count.WRITTEN], counts[Count.UNWRITTEN]) == (2, 1)
    writing.forget([key(2), key(77)])
    assert writing.wants(key(2), 1)


def test_only_so_many_are_known_the_latest_ones(writer: Maker) -> None:
    writing = writer(known=3)
    for number in range(6):
        writing.offer(label(number), payload(number))
    assert writing.flush(LONG)
    assert [writing.wants(key(number), 1) for number in range(6)] == [True] * 3 + [False] * 3


def test_what_waits_is_put_together_up_to_a_size(writer: Maker, shelf: Shelf) -> None:
    writing = writer(at_once=3500)
    shelf.gate.clear()
    writing.offer(label(0), payload(0))
    assert shelf.entered.wait(LONG)
    for number in range(1, 8):
        writing.offer(label(number), payload(number))
    writing.offer(label(8), payload(8, 9000))
    writing.offer(label(9), payload(9))
    shelf.gate.set()
    assert writing.flush(LONG)
    assert [len(batch) for batch in shelf.batches] == [1, 3, 3, 1, 1, 1]


def test_closing_stores_what_was_offered_and_takes_nothing_more(writer: Maker, shelf: Shelf, counts: Counts) -> None:
    writing = writer()
    for number in range(30):
        writing.offer(label(number), payload(number))
    assert writing.close(LONG)
    assert len(shelf.entries) == 30
    assert not writing.offer(label(50), payload(50))
    assert not writing.wants(key(50), 1)
    assert writing.flush(0)
    assert writing.close(LONG)
    assert counts[Count.UNWRITTEN] == 0


def test_closing_gives_up_in_time_what_a_slow_store_does_not_take(writer: Maker, shelf: Shelf, counts: Counts) -> None:
    writing = writer(at_once=1)
    shelf.gate.clear()
    for number in range(10):
        writing.offer(label(number), payload(number))
    assert shelf.entered.wait(LONG)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(writing.flush, LONG)
        closing = pool.submit(writing.close, 0.05)
        while counts[Count.UNWRITTEN] < 9:
            assert not closing.done()
        shelf.gate.set()
        assert closing.result(LONG) is False
        assert waiting.result(LONG) is True
    assert list(shelf.entries) == [key(0)]


def test_many_threads_may_offer(writer: Maker, shelf: Shelf, counts: Counts) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    writing = writer(queued=40_000, at_once=5000, known_for=1e9)

    def offering(number: int) -> int:
        source = random.Random(seed + number)
        return sum(writing.offer(label(of := source.randrange(300)), payload(of)) for _ in range(400))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        taken = sum(pool.map(offering, range(4)))
    assert writing.flush(LONG)
    assert taken == counts[Count.OFFERED] == counts[Count.WRITTEN] == len(shelf.entries)
    assert taken + counts[Count.KNOWN] + counts[Count.DROPPED] == 1600
    assert all(shelf.entries[key(number)] == entry(number) for number in range(300) if key(number) in shelf.entries)


def test_labels_say_what_an_entry_is(writer: Maker, shelf: Shelf) -> None:
    writing = writer()
    writing.offer(Label(SCOPE, key(5), key(4)), payload(5))
    assert writing.flush(LONG)
    assert shelf.entries[key(5)] == entry(5)
