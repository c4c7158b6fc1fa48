"""Writing behind: blocks are queued by whoever computed them, and put into the store by a thread of their own."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tokenmill.core.clock import Clock, MonotonicClock
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.entry import Data, Label, pack

Put = Callable[[Sequence[tuple[bytes, Data]]], list[bool]]
"""As in `Store` (tiers.py)."""


class WriterPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """queued: bytes of payloads that wait or are being put. at_once: bytes put together. known, known_for: how many blocks are remembered
    as stored, and for how many seconds, since the store forgets without saying so."""

    queued: int = 256 << 20
    at_once: int = 8 << 20
    known: int = 1 << 16
    known_for: float = 300.0


class Writer:
    """For any thread. Never blocks who offers; who begins it ends it with `close`."""

    def __init__(self, put: Put, counts: Counts, policy: WriterPolicy | None = None, clock: Clock | None = None) -> None:
        self._put = put
        self._counts = counts
        self._policy = policy or WriterPolicy()
        self._clock = clock or MonotonicClock()
        self._changed = threading.Condition()
        self._queue: collections.deque[tuple[Label, Data]] = collections.deque()
        self._pending: set[bytes] = set()  # keys in the queue or being put
        self._bytes = 0  # of their payloads
        self._known: collections.OrderedDict[bytes, float] = collections.OrderedDict()  # key -> until when
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-store-writer", daemon=True)
        self._thread.start()

    def wants(self, key: bytes, size: int) -> bool:
        """Whether an `offer` would be taken, for who would have to gather the payload first. What it would not is counted here."""
        with self._changed:
            return self._takes(key, size)

    def offer(self, label: Label, payload: Data) -> bool:
        """Queue a block, whose payload nobody changes any more. What is queued, known to be stored, or too much is not taken."""
        with self._changed:
            if not self._takes(label.key, len(payload)):
                return False
            self._counts.add(Count.OFFERED)
            self._queue.append((label, payload))
            self._pending.add(label.key)
            self._bytes += len(payload)
            self._changed.notify_all()
            return True

    def forget(self, keys: Iterable[bytes]) -> None:
        """These have turned out not to be stored."""
        with self._changed:
            for key in keys:
                self._known.pop(key, None)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was offered has been put or given up, at most so many seconds; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def close(self, timeout: float) -> bool:
        """Take nothing more, `flush`, and give up what is left then; returns whether nothing was. The thread has ended when this returns,
        which may be one `put` later."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        flushed = self.flush(timeout)
        with self._changed:
            for label, payload in self._queue:
                self._pending.remove(label.key)
                self._bytes -= len(payload)
                self._counts.add(Count.UNWRITTEN)
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()
        return flushed

    def _takes(self, key: bytes, size: int) -> bool:
        until = self._known.get(key)
        if key in self._pending or (until is not None and self._clock.now() < until):
            self._counts.add(Count.KNOWN)
            return False
        if self._closing or self._bytes + size > self._policy.queued:
            self._counts.add(Count.DROPPED)
            return False
        return True

    def _run(self) -> None:
        while batch := self._next():
            entries = [(label.key, pack(label, payload)) for label, payload in batch]
            stored = self._put(entries)
            self._done(batch, stored)

    def _next(self) -> list[tuple[Label, Data]]:
        """What is put together next, once there is something; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            batch: list[tuple[Label, Data]] = []
            size = 0
            while self._queue and (not batch or size + len(self._queue[0][1]) <= self._policy.at_once):
                batch.append(self._queue.popleft())
                size += len(batch[-1][1])
            return batch

    def _done(self, batch: Sequence[tuple[Label, Data]], stored: Sequence[bool]) -> None:
        with self._changed:
            until = self._clock.now() + self._policy.known_for
            for (label, payload), there in zip(batch, stored, strict=True):
                self._pending.remove(label.key)
                self._bytes -= len(payload)
                self._counts.add(Count.WRITTEN if there else Count.UNWRITTEN)
                if there:
                    self._counts.add(Count.WRITTEN_BYTES, len(payload))
                    self._known[label.key] = until
                    self._known.move_to_end(label.key)
            while len(self._known) > self._policy.known:
                self._known.popitem(last=False)
            self._changed.notify_all()
