"""Frames on their way between engines: those that others read, and those to which is written what others have computed.

| frames are       | to be                                              | until                                                     |
|------------------|----------------------------------------------------|-----------------------------------------------------------|
| in a lease       | read by another engine; full, in the prefix cache  | that engine has them, or does not come for them           |
| in a reservation | written to as they come from elsewhere; each full  | all have come, or nothing more does: a sequence then finds |
|                  | one enters the prefix cache when it is there       | in the prefix cache what has come, and computes the rest  |

Both are tables of the KV manager beside those of running sequences, and give way to these: whoever runs never waits for frames on their
way, and is never preempted for them. Reservations also give way to who waits while nobody runs: what they wait for may be computed by an
engine that waits in the same way for this one. Leases need nothing more from here, and end. What is lost is computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenmill.core.types import FRAME
from tokenmill.kv.manager import KVManager


class Place(NamedTuple):
    """Frames of positions [start, stop), both multiples of 8. frames: per KV group in their order, -1 where a row at `stop` does not
    look (windows)."""

    start: int
    stop: int
    frames: tuple[tuple[int, ...], ...]


class Gate:
    """Between who writes to a reservation's frames, in a thread of its own, and their end. The writer is inside it as long as it writes,
    and does so only if it is `open` when its `interrupt` is set. After `stop` the writer ends soon; when `close` returns, nobody writes
    any more."""

    def __init__(self) -> None:
        self.open = True
        self.interrupt: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def __enter__(self) -> Gate:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupt = lambda: None
        self._lock.release()

    def stop(self) -> None:
        self.open = False
        self.interrupt()

    def close(self) -> None:
        self.stop()
        with self._lock:
            pass


@dataclass(eq=False, slots=True)
class _Lease:
    """The KV manager knows it by its identity, as it does a reservation."""


@dataclass(eq=False, slots=True)
class _Reservation:
    tokens: Sequence[int]
    brief: bool
    there: int = 0
    gate: Gate = field(default_factory=Gate)


class Transit:
    """Leases and reservations under keys of the caller's. lost: keys of those that have given way to running sequences, for the caller
    to see and to clear."""

    def __init__(self, kv: KVManager, chunk: int) -> None:
        """chunk: the most prompt tokens of one sequence in a step."""
        self.lost: list[Hashable] = []
        self._kv = kv
        self._chunk = chunk
        self._held: dict[Hashable, _Lease | _Reservation] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    @property
    def n_reserved(self) -> int:
        """Reservations. O(leases and reservations)."""
        return sum(isinstance(one, _Reservation) for one in self._held.values())

    def lease(self, key: Hashable, tokens: Sequence[int], salt: str, start: int, stop: int) -> Place | None:
        """Keep the frames of [start, stop) of a sequence that has computed `stop` tokens and has more. None if they are not to be
        found by others, as those of sparse sequences, or if those that have fallen out of its windows are promised to who runs."""
        assert key not in self._held, f"{key!r} is leased already"
        assert start % FRAME == stop % FRAME == 0, f"[{start}, {stop}) is not of whole frames"
        one = _Lease()
        if self._kv.acquire(one, tokens[: stop + 1], salt) < stop or self._kv.available < 0:
            self._kv.release(one)
            return None
        self._held[key] = one
        return self._place(one, start, stop)

    def reserve(self, key: Hashable, tokens: Sequence[int], salt: str, spare: int, brief: bool = False) -> int | None:
        """Take frames for a prompt and a token more, and say how many positions of it are there already. None if there is no room,
        with `spare` frames left for those who run. brief: what it waits for comes from a store, soon or not at all."""
        assert key not in self._held, f"{key!r} is reserved already"
        hit, goal = self._kv.match(tokens, salt), len(tokens) + 1
        if self._kv.fresh(hit, goal, self._chunk) + hit.idle + spare > self._kv.available:
            return None
        one = self._held[key] = _Reservation(tokens, brief)
        one.there = self._kv.acquire(one, tokens, salt)
        self._kv.promise(one, goal, self._chunk)
        return one.there

    def there(self, key: Hashable) -> int:
        """Positions of a reservation that have come."""
        return self._reservation(key).there

    def place(self, key: Hashable, stop: int) -> Place | None:
        """Where the keys and values go from `there` to `stop`. None if there are no frames: the reservation is to be released."""
        one = self._reservation(key)
        assert one.there < stop <= len(one.tokens), f"{stop} does not go on from {one.there} of {len(one.tokens)}"
        assert stop % FRAME == 0, f"{stop} cuts a frame"
        if not self._kv.place(one, stop):
            return None
        return self._place(one, one.there, stop)

    def gate(self, key: Hashable) -> Gate:
        """Of a reservation."""
        return self._reservation(key).gate

    def land(self, key: Hashable, stop: int) -> None:
        """Keys and values up to `stop` are in their frames."""
        one = self._reservation(key)
        one.there = stop
        self._kv.commit(one, one.tokens, stop)

    def release(self, key: Hashable) -> None:
        """The end of a lease or a reservation; unknown keys are let pass, since it may have given way. What has come stays cached."""
        one = self._held.pop(key, None)
        if isinstance(one, _Reservation):
            one.gate.close()
        if one is not None:
            self._kv.release(one)

    def give_way(self, leases: bool) -> bool:
        """Release the youngest reservation, or lease if these are meant too, for sequences that need its frames; False if there is none.
        Brief reservations are as leases."""
        key = next((key for key in reversed(self._held) if leases or self._waits_for_others(key)), None)
        if key is None:
            return False
        self.release(key)
        self.lost.append(key)
        return True

    def _waits_for_others(self, key: Hashable) -> bool:
        one = self._held[key]
        return isinstance(one, _Reservation) and not one.brief

    def _reservation(self, key: Hashable) -> _Reservation:
        one = self._held[key]
        assert isinstance(one, _Reservation), f"{key!r} is a lease"
        return one

    def _place(self, one: Hashable, start: int, stop: int) -> Place:
        frames = tuple(tuple(table.frames(start // FRAME, stop // FRAME)) for table in self._kv.tables(one))
        return Place(start, stop, frames)
