"""Fetching: threads that bring blocks for those who wait for them, and check each before anybody sees it."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tokenmill.core.clock import Clock, MonotonicClock
from tokenmill.transfer.store.choice import FetchOrCompute
from tokenmill.transfer.store.counts import Count, Counts, rejected
from tokenmill.transfer.store.entry import HEAD_BYTES, NO_PARENT, Label, Reason, Scope, unpack
from tokenmill.transfer.store.tiers import Store

log = logging.getLogger(__name__)


class ReaderPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """threads: fetches at the same time. at_once: bytes of entries that each of them has room for, and for one in any case."""

    threads: int = 2
    at_once: int = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Blocks of one text that follow each other.

    keys: theirs. parent: the key of the block before the first, `NO_PARENT` if there is none. sizes: what their payloads can be long, the
    longest first. block_tokens: of each. deadline: on the reader's clock, when it is too late.

    take: is given each block that came and is what it should be, in order, with its number in `keys`; returns whether it was taken, and
    then the next may follow. What the view shows is there for the time of the call only. done: is told once, last, how many were taken.
    Both are called by a thread of the reader.
    """

    scope: Scope
    keys: Sequence[bytes]
    sizes: Sequence[int]
    block_tokens: int
    take: Callable[[int, memoryview], bool]
    done: Callable[[int], None]
    parent: bytes = NO_PARENT
    deadline: float = math.inf

    @property
    def block_bytes(self) -> int:
        return self.sizes[0]

    def label(self, number: int) -> Label:
        return Label(self.scope, self.keys[number], self.keys[number - 1] if number else self.parent)


class Fetch:
    """One that is waiting or under way. taken: blocks so far."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.taken = 0
        self.cancelled = False
        self._taking = threading.RLock()

    def cancel(self) -> None:
        """When this returns, `take` is not running and is not called again: what it writes to may go. `done` is still called."""
        self.cancelled = True
        with self._taking:
            pass

    def give(self, payload: memoryview) -> bool:
        """The next block; returns whether it was taken."""
        with self._taking:
            if self.cancelled or not self.wanted.take(self.taken, payload):
                return False
            self.taken += 1
            return True


class Reader:
    """For any thread. Who begins it ends it with `close`."""

    def __init__(
        self,
        store: Store,
        counts: Counts,
        *,
        forget: Callable[[Sequence[bytes]], None],
        policy: ReaderPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        """forget: is told of keys that are not stored after all."""
        self._store = store
        self._counts = counts
        self._forget = forget
        self._policy = policy = policy or ReaderPolicy()
        self._clock = clock or MonotonicClock()
        self._measuring = threading.Lock()
        self._choice = FetchOrCompute(self._clock)
        self._expected = 0  # bytes that are on their way
        self._changed = threading.Condition()
        self._queue: collections.deque[Fetch] = collections.deque()
        self._closing = False
        self._threads = [threading.Thread(target=self._run, name=f"kv-store-reader-{n}", daemon=True) for n in range(policy.threads)]
        for thread in self._threads:
            thread.start()

    def fetch(self, wanted: Wanted) -> Fetch:
        """Begin to bring blocks."""
        fetch = Fetch(wanted)
        self._counts.add(Count.FETCHES)
        with self._changed:
            assert not self._closing, "the reader is closed"
            self._queue.append(fetch)
            self._changed.notify()
        return fetch

    def computed(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed in that time, which fetching has to beat."""
        with self._measuring:
            self._choice.computed(tokens, seconds)

    def close(self) -> None:
        """End all fetches, each with its `done`, and the threads: those under way after the exchange with the store that they are in."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        room = bytearray()
        while (fetch := self._next()) is not None:
            needed = self._batch(fetch.wanted) * _entry_bytes(fetch.wanted)
            if len(room) < needed:
                room = bytearray(needed)  # and used again: new memory costs more than filling it
            # Whoever waits is told the end, whatever happened.
            try:
                if not self._over(fetch):
                    self._bring(fetch, self._worth(fetch.wanted), memoryview(room))
            except Exception:
                log.exception("a fetch from the KV store ended early")
            try:
                fetch.wanted.done(fetch.taken)
            except Exception:
                log.exception("nobody could be told that a fetch from the KV store has ended")

    def _next(self) -> Fetch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None

    def _over(self, fetch: Fetch) -> bool:
        if fetch.cancelled:
            self._counts.add(Count.CANCELLED)
            return True
        if self._clock.now() >= fetch.wanted.deadline:
            self._counts.add(Count.LATE)
            return True
        return self._closing

    def _worth(self, wanted: Wanted) -> int:
        """How many blocks to bring."""
        began = self._clock.now()
        found = self._store.find(wanted.keys)
        now = self._clock.now()
        self._forget(wanted.keys[found:])
        with self._measuring:
            self._choice.asked(now - began)
            count = self._choice.worth(found, wanted.block_bytes, wanted.block_tokens, wanted.deadline - now, self._expected)
        self._counts.add(Count.FOUND, found)
        self._counts.add(Count.NOT_WORTH, found - count)
        return count

    def _batch(self, wanted: Wanted) -> int:
        """Blocks that are brought together."""
        return max(1, self._policy.at_once // _entry_bytes(wanted))

    def _bring(self, fetch: Fetch, count: int, room: memoryview) -> None:
        wanted = fetch.wanted
        with self._expecting(count * _entry_bytes(wanted)):
            while fetch.taken < count and not self._over(fetch):
                keys = wanted.keys[fetch.taken : min(fetch.taken + self._batch(wanted), count)]
                entries = self._get(keys, room)
                for entry in entries:
                    if not self._deliver(fetch, entry):
                        return
                if len(entries) < len(keys):
                    self._lost(keys[len(entries)])
                    return

    def _get(self, keys: Sequence[bytes], room: memoryview) -> list[memoryview]:
        began = self._clock.now()
        entries = self._store.get(keys, room)
        size = sum(map(len, entries))
        self._counts.add(Count.FETCHED_BYTES, size)
        with self._measuring:
            self._choice.fetched(size, self._clock.now() - began)
        return entries

    def _deliver(self, fetch: Fetch, entry: memoryview) -> bool:
        """Check and give the next block; returns whether it was taken."""
        label = fetch.wanted.label(fetch.taken)
        payload = unpack(label, entry)
        if not isinstance(payload, Reason) and len(payload) not in fetch.wanted.sizes:
            payload = Reason.SIZE
        if isinstance(payload, Reason):
            self._counts.add(rejected(payload))
            self._lost(label.key)
            return False
        if not fetch.give(payload):
            return False
        self._counts.add(Count.FETCHED)
        return True

    def _lost(self, key: bytes) -> None:
        """What was found and is of no use would be found again, and keep the right one from being stored."""
        self._store.discard([key])
        self._forget([key])

    @contextlib.contextmanager
    def _expecting(self, size: int) -> Iterator[None]:
        with self._measuring:
            self._expected += size
        try:
            yield
        finally:
            with self._measuring:
                self._expected -= size


def _entry_bytes(wanted: Wanted) -> int:
    return HEAD_BYTES + wanted.block_bytes
