"""A worker's part in the KV store: what it has of prompts is brought before they are computed, and what steps fill is kept.

A sequence that could be admitted is passed over while its blocks come, into a reservation of frames (engine/transit.py): what has come is
then found like a prefix, and the rest is computed. So sequences keep their order, and whoever loses its frames by preemption is looked up
again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.core.blocks import BLOCK, block_hashes
from tokenmill.core.clock import Clock, MonotonicClock
from tokenmill.core.config import KVStoreConfig
from tokenmill.core.messages import StoreStats
from tokenmill.core.types import FRAME
from tokenmill.engine.filling import FRAMES
from tokenmill.transfer.store.disk import DiskPolicy
from tokenmill.transfer.store.entry import NO_PARENT, Label, Scope
from tokenmill.transfer.store.reader import Fetch, Wanted
from tokenmill.transfer.store.remote import RemotePolicy
from tokenmill.transfer.store.service import KVStore, StorePolicy
from tokenmill.worker.block_bytes import HOLE, BlockBytes

if TYPE_CHECKING:
    from tokenmill.engine.engine import Engine
    from tokenmill.engine.transit import Gate, Place
    from tokenmill.scheduler.sequence import Sequence

LONGEST_WAIT = 10.0
"""Seconds for which a request waits for its blocks. The store's estimates and timeouts end nearly all waits long before."""

AT_THE_END = 5.0
"""Seconds for which a worker that ends goes on to store what it has computed."""


@dataclass(slots=True, eq=False)
class _Text:
    """Blocks [first, stop) of a sequence's tokens, on their way. keys: their names. again: it was tried before, and less was there than was
    hoped for."""

    sequence: Sequence
    first: int
    stop: int
    keys: list[bytes]
    fetch: Fetch
    again: bool


class Stock:
    """Made for one engine and used by the loop that steps it. Nothing here blocks, and what goes wrong with the store costs time alone."""

    def __init__(self, engine: Engine, store: KVStore, post: Callable[[Hashable], None], clock: Clock | None = None) -> None:
        """post: hands the key of a fetch that has ended, in a thread of the store's, to `fetched`, in the loop."""
        assert engine.filling is not None, "the engine of a worker with a store tells what it fills"
        self._engine = engine
        self._filling = engine.filling
        self._store = store
        self._post = post
        self._clock = clock or MonotonicClock()
        self._bytes = BlockBytes(engine.memory, engine.windows)
        self._slides = any(window is not None for window in engine.windows)
        self._texts: dict[Hashable, _Text] = {}
        self._followers: list[Sequence] = []
        """Sequences whose next block is on its way for another one."""
        self._numbers = itertools.count()
        self._tokens = 0

    def __len__(self) -> int:
        """Sequences whose blocks are on their way."""
        return len(self._texts)

    def tick(self) -> None:
        """Look up who could be admitted by the next step; to be called before that is planned."""
        for key, text in list(self._texts.items()):
            if key not in self._engine.transit:  # it has given way to sequences that run
                text.fetch.cancel()
                self._end(key)
        for sequence in self._engine.next_ones():
            if not sequence.looked_up and not self._look_up(sequence):
                return

    def fetched(self, key: Hashable) -> None:
        """As it was posted."""
        if key in self._texts:
            self._end(key)

    def abandon(self) -> None:
        """Nobody wants anything any more."""
        for key, text in list(self._texts.items()):
            text.fetch.cancel()
            self._end(key)

    def stepped(self) -> None:
        """Keep what a step has filled; to be called before the next one begins."""
        self._store.computed(*self._filling.pace())
        for block in self._filling.take():
            if not self._store.wants(block.key, self._bytes.sizes[0]):
                continue
            payload = self._bytes.gather(block.frames)
            if payload is not None:
                label = Label(self._scope(block.salt), block.key, block.parent or NO_PARENT)
                self._store.keep(label, payload.data)
        self._engine.transit.lost.clear()  # `tick` has looked for its own

    def stats(self) -> StoreStats:
        return StoreStats(waiting=len(self), fetched_tokens=self._tokens, counts=self._store.counts())

    def close(self) -> None:
        """Store for a while what was kept, and end all threads."""
        self._store.close(AT_THE_END)

    def _look_up(self, sequence: Sequence) -> bool:
        """Begin to bring what there may be. False if there is no room for it, so that it could not be admitted either."""
        if sequence.awaits:
            return True
        usable = sequence.target if sequence.reuse_limit is None else min(sequence.target, sequence.reuse_limit)
        return self._begin(sequence, usable // BLOCK, again=False)

    def _begin(self, sequence: Sequence, stop: int, again: bool) -> bool:
        """stop: how many of the sequence's blocks are wanted."""
        key, transit = ("store", next(self._numbers)), self._engine.transit
        sequence.looked_up = True
        if not stop:
            return True
        have = self._engine.make_room(key, sequence)
        if have is None:
            sequence.looked_up = False
            return False
        first = have // BLOCK
        hashes: list[bytes] = []
        if first < stop:
            hashes = block_hashes(sequence.token_ids[: stop * BLOCK], sequence.cache_salt, self._engine.info.fingerprint)
        if hashes and any(hashes[first] in text.keys for text in self._texts.values()):
            sequence.looked_up, sequence.awaits = False, True
            self._followers.append(sequence)
            hashes = []
        place = transit.place(key, stop * BLOCK) if hashes else None
        if place is None:
            transit.release(key)
            return True
        wanted = Wanted(
            scope=self._scope(sequence.cache_salt),
            keys=hashes[first:],
            parent=hashes[first - 1] if first else NO_PARENT,
            sizes=self._bytes.sizes,
            block_tokens=BLOCK,
            take=self._taker(place, first, transit.gate(key)),
            done=lambda taken: self._post(key),
            deadline=self._clock.now() + LONGEST_WAIT,
        )
        sequence.awaits = True
        self._texts[key] = _Text(sequence, first, stop, hashes[first:], self._store.fetch(wanted), again)
        return True

    def _taker(self, place: Place, first: int, gate: Gate) -> Callable[[int, memoryview], bool]:
        """What a thread of the store does with blocks, from the text's block `first` on."""

        def frames(of_group: Ordered[int], block: int) -> list[int]:
            start = block * FRAMES - place.start // FRAME  # of the block, in `of_group`; what lies before that is there already
            return [HOLE] * -min(start, 0) + list(of_group[max(start, 0) : start + FRAMES])

        def take(number: int, payload: memoryview) -> bool:
            with gate:
                if not gate.open:
                    return False
                return self._bytes.scatter(np.frombuffer(payload, np.uint8), [frames(group, first + number) for group in place.frames])

        return take

    def _end(self, key: Hashable) -> None:
        """Nothing more comes of a text."""
        text, transit = self._texts.pop(key), self._engine.transit
        sequence, come = text.sequence, text.first + text.fetch.taken
        missing = come < text.stop
        if key in transit:
            if text.fetch.taken and not (missing and self._slides):
                self._tokens += come * BLOCK - transit.there(key)
                transit.land(key, come * BLOCK)
            transit.release(key)
        sequence.awaits = False
        for follower in self._followers:
            follower.awaits = False
        self._followers.clear()
        if missing and self._slides and text.fetch.taken and not text.again and not text.fetch.cancelled:
            # Of windows only what is seen from the end was brought, which is now another one.
            self._begin(sequence, come, again=True)

    def _scope(self, salt: str) -> Scope:
        return Scope.of(self._engine.info.fingerprint, salt)


def open_stock(config: KVStoreConfig, engine: Engine, post: Callable[[Hashable], None]) -> Stock:
    """A worker's stock, in the store that its settings name. Raises `ConfigError`."""
    policy = StorePolicy(remote=RemotePolicy(ttl=config.ttl), disk=DiskPolicy(limit=int(config.folder_gb * 2**30)))
    folder = None if config.folder is None else Path(config.folder)
    block_bytes = BlockBytes(engine.memory, engine.windows).sizes[0]
    return Stock(engine, KVStore.open(config.url, folder, block_bytes, policy), post)
