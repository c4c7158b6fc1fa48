"""Which worker has which prefix in its KV cache, by the hashes of blocks (core/blocks.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

LEVELS = 4
"""Of the depths to which workers know one prompt, so many are told apart, the deepest: so the time of a look-up is bounded."""


class PrefixIndex:
    """Hash of a block -> the workers that have it, for at most `room` pairs of both; what was not told of for longest is forgotten.

    Chains are told whole, from the first block on, and again when a prompt was found and not computed. A worker that has a block has all
    before it, and of a chain its end is forgotten first; so holders become fewer along a chain, and how far each worker knows it is found
    by bisection. Reports that break this rule, such as an eviction in the middle, make matches shorter or longer than they are; this costs
    time, and no answer depends on it.
    """

    def __init__(self, room: int) -> None:
        assert room > 0, f"room for {room} blocks"
        self._room = room
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()  # what was not told of for longest first
        self._blocks: dict[str, set[bytes]] = {}  # the same by worker
        self._pairs = 0

    def add(self, worker_id: str, chain: Sequence[bytes]) -> None:
        """A worker has these blocks: all of a prompt from its first on, as far as it has them. To be told for each prompt that it has
        served, so that what is used is not forgotten. O(blocks)."""
        if not chain:
            return
        mine = self._blocks.setdefault(worker_id, set())
        for block in reversed(chain):
            if block not in mine:
                mine.add(block)
                self._holders[block] = (*self._holders.get(block, ()), worker_id)
                self._pairs += 1
            self._holders.move_to_end(block)
        while self._pairs > self._room:
            block, holders = self._holders.popitem(last=False)
            for holder in holders:
                self._forget(holder, block)

    def remove(self, worker_id: str, blocks: Iterable[bytes]) -> None:
        """A worker has evicted these blocks, in any order."""
        mine = self._blocks.get(worker_id, set())
        for block in blocks:
            if block in mine:
                self._drop(worker_id, block)

    def leave(self, worker_id: str) -> None:
        """A worker has nothing any more. O(its blocks)."""
        for block in list(self._blocks.get(worker_id, ())):
            self._drop(worker_id, block)

    def depths(self, chain: Sequence[bytes]) -> dict[str, int]:
        """For each worker that knows the start of the chain: how many of its blocks. Of more than `LEVELS` different depths the
        smallest are missing."""
        holders = self._holders.get
        end = bisect_left(chain, True, key=lambda block: block not in self._holders)
        found: dict[str, int] = {}
        for _ in range(LEVELS):
            if not end:
                break
            here = holders(chain[end - 1], ())
            for worker_id in here:
                found.setdefault(worker_id, end)
            end = bisect_left(chain, -len(here), 0, end - 1, key=lambda block: -len(holders(block, ())))
        return found

    def depth(self, worker_id: str, chain: Sequence[bytes]) -> int:
        """How many blocks of the chain a worker has."""
        mine = self._blocks.get(worker_id)
        return bisect_left(chain, True, key=lambda block: block not in mine) if mine else 0

    def __len__(self) -> int:
        """Pairs of a block and a worker."""
        return self._pairs

    def _drop(self, worker_id: str, block: bytes) -> None:
        left = tuple(holder for holder in self._holders[block] if holder != worker_id)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
        self._forget(worker_id, block)

    def _forget(self, worker_id: str, block: bytes) -> None:
        mine = self._blocks[worker_id]
        mine.remove(block)
        if not mine:
            del self._blocks[worker_id]
        self._pairs -= 1
