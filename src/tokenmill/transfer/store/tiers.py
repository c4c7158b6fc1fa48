"""Several stores as one: the nearest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenmill.transfer.store.entry import Data


class Store(Protocol):
    """Entries under keys of 16 bytes. Everything is bounded in time, nothing raises: what cannot be done now is not done, and counted.

    Keys are those of a text's blocks in order, and a block without those before it is of no use. So what is found are the first ones.
    """

    def find(self, keys: Sequence[bytes]) -> int:
        """How many entries are there from the first on."""
        ...

    def get(self, keys: Sequence[bytes], room: memoryview) -> list[memoryview]:
        """The entries that are there, from the first on, each as it was put or damaged; one after the other in `room`, until it is full."""
        ...

    def put(self, entries: Sequence[tuple[bytes, Data]]) -> list[bool]:
        """Keep (key, entry) pairs; returns of each whether it is there now. What is there already is as good as new, and stays."""
        ...

    def discard(self, keys: Sequence[bytes]) -> None:
        """Forget entries that were found and turned out to be of no use, so that they can be put anew."""
        ...

    def close(self) -> None: ...


class Tiers:
    """A `Store` made of others, which it closes. Entries are looked for in the first, and what is not there in the next."""

    def __init__(self, stores: Sequence[Store]) -> None:
        assert stores, "no store"
        self._stores = tuple(stores)

    def find(self, keys: Sequence[bytes]) -> int:
        return self._in_turn(len(keys), lambda store, found: store.find(keys[found:]))

    def get(self, keys: Sequence[bytes], room: memoryview) -> list[memoryview]:
        """What comes from a later store is put into those before it."""
        entries: list[memoryview] = []

        def more(store: Store, found: int) -> int:
            got = store.get(keys[found:], room[sum(map(len, entries)) :])
            entries.extend(got)
            if got:
                for nearer in self._stores[: self._stores.index(store)]:
                    nearer.put(list(zip(keys[found:], got, strict=False)))
            return len(got)

        self._in_turn(len(keys), more)
        return entries

    def put(self, entries: Sequence[tuple[bytes, Data]]) -> list[bool]:
        """True where at least one store has it."""
        kept = [store.put(entries) for store in self._stores]
        return [any(of_entry) for of_entry in zip(*kept, strict=True)]

    def discard(self, keys: Sequence[bytes]) -> None:
        for store in self._stores:
            store.discard(keys)

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _in_turn(self, wanted: int, more: Callable[[Store, int], int]) -> int:
        """Ask store after store how many it adds to what was found, until all is found or none of them can add to it."""
        found = exhausted = 0
        for store in itertools.cycle(self._stores):
            if found == wanted or exhausted == len(self._stores):
                return found
            added = more(store, found)
            found += added
            # One that added something has no more now; the others have not been asked about what follows.
            exhausted = 1 if added else exhausted + 1
        raise AssertionError("there is a store")
