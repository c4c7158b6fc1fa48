from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from store_blocks import SCOPE, entries, entry, key, keys, label, payload
from store_servers import LONG

from tokenmill.core.clock import ManualClock
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.disk import DiskStore
from tokenmill.transfer.store.entry import Label, Scope, pack
from tokenmill.transfer.store.reader import Fetch, Reader, ReaderPolicy, Wanted

SIZE = 1000


class Waiter:
    """Who waits for blocks, and keeps a copy of what comes."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.ends: list[int] = []
        self.ended = threading.Event()
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.most = 1000

    def take(self, number: int, block: memoryview) -> bool:
        assert number == len(self.blocks)
        self.entered.set()
        assert self.gate.wait(LONG)
        if number == self.most:
            return False
        self.blocks.append(bytes(block))
        return True

    def done(self, count: int) -> None:
        self.ends.append(count)
        self.ended.set()

    def wants(self, numbers: Sequence[int], **changes: object) -> Wanted:
        options: dict[str, object] = {
            "scope": SCOPE,
            "keys": [key(number) for number in numbers],
            "sizes": (SIZE,),
            "block_tokens": 64,
            "take": self.take,
            "done": self.done,
        }
        return Wanted(**(options | changes))  # type: ignore[arg-type]

    def got(self) -> list[bytes]:
        """All that came, once it has ended, which it may only once."""
        assert self.ended.wait(LONG)
        assert self.ends == [len(self.blocks)]
        return self.blocks


class Slow(DiskStore):
    """A disk whose answers wait for a gate."""

    def __init__(self, folder: Path, counts: Counts) -> None:
        super().__init__(folder, counts)
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Semaphore(0)
        self.batches: list[int] = []

    def get(self, keys: Sequence[bytes], room: memoryview) -> list[memoryview]:
        self.batches.append(len(keys))
        self.asked.release()
        assert self.gate.wait(LONG)
        return super().get(keys, room)


@pytest.fixture
def store(tmp_path: Path, counts: Counts) -> Slow:
    return Slow(tmp_path / "kv", counts)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def forgotten() -> list[bytes]:
    return []


Make = Callable[..., Reader]


@pytest.fixture
def reader(store: Slow, counts: Counts, clock: ManualClock, forgotten: list[bytes]) -> Iterator[Make]:
    made: list[Reader] = []

    def make(**policy: int) -> Reader:
        made.append(Reader(store, counts, forget=forgotten.extend, policy=ReaderPolicy(**policy), clock=clock))
        return made[-1]

    yield make
    store.gate.set()
    for each in made:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-store")]


def test_blocks_that_are_stored_come_in_order_and_then_the_end(reader: Make, store: Slow, counts: Counts) -> None:
    store.put(entries(20))
    waiter = Waiter()
    reader().fetch(waiter.wants(range(20)))
    assert waiter.got() == [payload(number) for number in range(20)]
    assert (counts[Count.FETCHES], counts[Count.FOUND], counts[Count.FETCHED]) == (1, 20, 20)
    assert counts[Count.FETCHED_BYTES] == 20 * 1096


def test_a_text_is_taken_up_where_it_is_known_already(reader: Make, store: Slow) -> None:
    store.put(entries(6))
    waiter = Waiter()
    reader().fetch(waiter.wants(range(4, 9), parent=key(3)))
    assert waiter.got() == [payload(4), payload(5)]


def test_nothing_stored_is_an_end_at_once_and_the_writer_is_told(reader: Make, forgotten: list[bytes]) -> None:
    waiter = Waiter()
    reader().fetch(waiter.wants(range(3)))
    assert waiter.got() == []
    assert forgotten == keys(3)


def test_few_are_in_memory_at_a_time(reader: Make, store: Slow) -> None:
    store.put(entries(10))
    waiter = Waiter()
    reader(at_once=3 * 1096).fetch(waiter.wants(range(10)))
    assert len(waiter.got()) == 10
    assert store.batches == [3, 3, 3, 1]


def test_blocks_of_other_sizes_follow_each_other(reader: Make, store: Slow) -> None:
    reading = reader(threads=1, at_once=1)
    for first, size in enumerate((100, 50_000, 10, 2000)):
        store.put([(key(100 * first), pack(Label(SCOPE, key(100 * first)), payload(first, size)))])
        waiter = Waiter()
        reading.fetch(waiter.wants([100 * first], sizes=(size,)))
        assert waiter.got() == [payload(first, size)]


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (pack(Label(Scope.of("other", "tenant"), key(2), key(1)), payload(2)), Count.REJECTED_FINGERPRINT),
        (pack(Label(Scope.of("model", "other"), key(2), key(1)), payload(2)), Count.REJECTED_TENANT),
        (pack(Label(SCOPE, key(2), key(7)), payload(2)), Count.REJECTED_PARENT),
        (entry(2, SIZE - 8), Count.REJECTED_SIZE),
        (entry(2, 0), Count.REJECTED_SIZE),
    ],
)
def test_what_is_not_the_block_is_never_seen_but_counted_and_gone(
    reader: Make, store: Slow, counts: Counts, forgotten: list[bytes], stored: bytes, reason: Count
) -> None:
    store.put([*entries(2), (key(2), stored), (key(3), entry(3))])
    waiter = Waiter()
    reader().fetch(waiter.wants(range(4)))
    assert waiter.got() == [payload(0), payload(1)]
    assert {count: counts[count] for count in Count if count.startswith("rejected") and counts[count]} == {reason: 1}
    assert forgotten == [key(2)]
    assert store.find([key(2)]) == 0
    store.put([(key(2), entry(2))])
    again = Waiter()
    reader().fetch(again.wants(range(4)))
    assert len(again.got()) == 4


def test_what_was_found_and_does_not_come_is_asked_for_no_more(reader: Make, store: Slow, forgotten: list[bytes]) -> None:
    store.put([*entries(1), (key(1), entry(1, 50_000)), (key(2), entry(2))])
    waiter = Waiter()
    reader().fetch(waiter.wants(range(3)))
    assert waiter.got() == [payload(0)]
    assert forgotten == [key(1)]
    assert store.find(keys(3)) == 1


def test_who_has_enough_gets_no_more(reader: Make, store: Slow, forgotten: list[bytes]) -> None:
    store.put(entries(9))
    waiter = Waiter()
    waiter.most = 5
    reader(at_once=2 * 1096).fetch(waiter.wants(range(9)))
    assert len(waiter.got()) == 5
    assert store.batches == [2, 2, 2]
    assert forgotten == []
    assert store.find(keys(9)) == 9


def test_after_a_cancel_nothing_is_taken(reader: Make, store: Slow, counts: Counts) -> None:
    store.put(entries(9))
    waiter = Waiter()
    waiter.gate.clear()
    fetch = reader(at_once=2 * 1096).fetch(waiter.wants(range(9)))
    assert waiter.entered.wait(LONG)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        cancelling = pool.submit(fetch.cancel)
        with pytest.raises(concurrent.futures.TimeoutError):
            cancelling.result(0.05)  # a block is just being taken
        waiter.gate.set()
        cancelling.result(LONG)
    taken = len(waiter.blocks)
    assert taken == 1
    assert waiter.got() == [payload(0)]
    assert len(waiter.blocks) == taken


def test_who_takes_may_cancel(reader: Make, store: Slow) -> None:
    store.put(entries(3))
    waiter, fetches = Waiter(), []

    def take(number: int, block: memoryview) -> bool:
        fetches[0].cancel()
        return waiter.take(number, block)

    store.gate.clear()
    fetches.append(reader().fetch(waiter.wants(range(3), take=take)))
    store.gate.set()
    assert waiter.got() == [payload(0)]


def test_what_was_cancelled_before_it_began_asks_nobody(reader: Make, store: Slow, counts: Counts) -> None:
    store.put(entries(3))
    store.gate.clear()
    first, second = Waiter(), Waiter()
    reading = reader(threads=1)
    reading.fetch(first.wants(range(3)))
    assert store.asked.acquire(timeout=LONG)
    reading.fetch(second.wants(range(3))).cancel()
    store.gate.set()
    assert second.got() == []
    assert len(first.got()) == 3
    assert len(store.batches) == 1
    assert counts[Count.CANCELLED] == 1


def test_what_comes_too_late_is_not_begun_and_not_gone_on_with(reader: Make, store: Slow, counts: Counts, clock: ManualClock) -> None:
    store.put(entries(4))
    store.gate.clear()
    first, second = Waiter(), Waiter()
    reading = reader(threads=1, at_once=2 * 1096)
    reading.fetch(first.wants(range(4), deadline=10.0))
    reading.fetch(second.wants(range(4), deadline=10.0))
    assert store.asked.acquire(timeout=LONG)
    clock.advance(10.0)
    store.gate.set()
    assert len(first.got()) == 2
    assert second.got() == []
    assert store.batches == [2]
    assert counts[Count.LATE] == 2


def test_what_does_not_pay_is_not_fetched(reader: Make, store: Slow, counts: Counts, clock: ManualClock) -> None:
    store.put(entries(4))
    reading = reader(threads=1)
    reading.computed(1_000_000, 0.001)
    store.gate.clear()
    first = Waiter()
    reading.fetch(first.wants(range(4)))
    assert store.asked.acquire(timeout=LONG)
    clock.advance(5.0)
    store.gate.set()
    assert len(first.got()) == 4
    second = Waiter()
    reading.fetch(second.wants(range(4)))
    assert second.got() == []
    assert counts[Count.NOT_WORTH] == 4
    assert (store.find(keys(4)), len(store.batches)) == (4, 1)


def test_what_is_on_its_way_for_others_makes_a_fetch_dearer(reader: Make, store: Slow, counts: Counts, clock: ManualClock) -> None:
    store.put(entries(30))
    reading = reader(threads=2, at_once=1096)
    waiters = [Waiter() for _ in range(3)]
    store.gate.clear()
    reading.fetch(waiters[0].wants(range(1)))
    assert store.asked.acquire(timeout=LONG)
    clock.advance(1.0)  # a second for a block
    store.gate.set()
    assert len(waiters[0].got()) == 1
    reading.computed(64, 2.0)  # two for computing it
    store.gate.clear()
    reading.fetch(waiters[1].wants(range(30)))
    assert store.asked.acquire(timeout=LONG)
    reading.fetch(waiters[2].wants(range(4)))
    assert waiters[2].got() == []
    assert counts[Count.NOT_WORTH] == 4
    store.gate.set()
    assert len(waiters[1].got()) == 30


def test_an_error_of_who_takes_ends_the_fetch_and_not_the_reader(reader: Make, store: Slow, caplog: pytest.LogCaptureFixture) -> None:
    store.put(entries(3))
    waiter = Waiter()

    def take(number: int, block: memoryview) -> bool:
        if number:
            raise RuntimeError("no room")
        return waiter.take(number, block)

    reading = reader(threads=1)
    reading.fetch(waiter.wants(range(3), take=take))
    assert len(waiter.got()) == 1

    def done(count: int) -> None:
        raise RuntimeError("nobody is there")

    reading.fetch(Waiter().wants(range(3), done=done))
    after = Waiter()
    reading.fetch(after.wants(range(3)))
    assert len(after.got()) == 3
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


def test_a_view_that_is_kept_too_long_hurts_nobody(reader: Make, store: Slow) -> None:
    reading = reader(threads=1, at_once=1)
    kept: list[memoryview] = []
    for number, size in enumerate((100, 5000, 90_000)):
        store.put([(key(number), pack(Label(SCOPE, key(number)), payload(number, size)))])
        waiter = Waiter()

        def take(number: int, block: memoryview, waiter: Waiter = waiter) -> bool:
            kept.append(block)
            return waiter.take(number, block)

        reading.fetch(waiter.wants([number], sizes=(size,), take=take))
        assert waiter.got() == [payload(number, size)]


def test_closing_tells_everyone_the_end(reader: Make, store: Slow) -> None:
    store.put(entries(9))
    store.gate.clear()
    waiters = [Waiter() for _ in range(6)]
    reading = reader(threads=2, at_once=2 * 1096)
    for waiter in waiters:
        reading.fetch(waiter.wants(range(9)))
    for _ in range(2):
        assert store.asked.acquire(timeout=LONG)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        closing = pool.submit(reading.close)
        with pytest.raises(concurrent.futures.TimeoutError):
            closing.result(0.05)  # two are in an exchange with the store
        store.gate.set()
        closing.result(LONG)
    assert sorted(len(waiter.got()) for waiter in waiters) == [0, 0, 0, 0, 2, 2]


def test_several_are_brought_at_the_same_time(reader: Make, store: Slow) -> None:
    store.put(entries(3))
    store.gate.clear()
    reading = reader(threads=2)
    waiters = [Waiter(), Waiter()]
    for waiter in waiters:
        reading.fetch(waiter.wants(range(3)))
    for _ in range(2):
        assert store.asked.acquire(timeout=LONG)
    store.gate.set()
    assert [len(waiter.got()) for waiter in waiters] == [3, 3]


def test_a_label_names_the_block_before(reader: Make) -> None:
    wanted = Waiter().wants(range(3), parent=key(9))
    assert [wanted.label(number).parent for number in range(3)] == [key(9), key(0), key(1)]
    assert Waiter().wants(range(3)).label(0) == label(0)
    assert Fetch(wanted).taken == 0
