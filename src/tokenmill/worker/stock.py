"""A worker's part in the KV store: what prompts have there is brought before they are computed, and what steps fill is kept.

A request that is to be computed waits while its blocks come, in a reservation of frames like one whose prompt another worker computes
(engine/transit.py): what has come is then found like a prefix, and the rest is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.core.blocks import BLOCK, block_hashes
from tokenmill.core.clock import Clock, MonotonicClock
from tokenmill.core.config import KVStoreConfig
from tokenmill.core.errors import TokenmillError
from tokenmill.core.messages import Generate, StoreStats
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

LONGEST_WAIT = 10.0
"""Seconds for which a request waits for its blocks. The store's estimates and timeouts end nearly all waits long before."""

AT_THE_END = 5.0
"""Seconds for which a worker that ends goes on to store what it has computed."""


@dataclass(slots=True, eq=False)
class _Request:
    """Waits for blocks of so many texts: one, unless several choices have different outputs already. then: what it waits for to do."""

    generate: Generate
    then: Callable[[], None]
    waiting: int = 0


@dataclass(slots=True, eq=False)
class _Text:
    """Blocks [first, stop) of one text, on their way. again: it was tried before, and less was there than was hoped for."""

    request: _Request
    choice: int
    first: int
    stop: int
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
        self._numbers = itertools.count()
        self._tokens = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return len({id(text.request) for text in self._texts.values()})

    def bring(self, generate: Generate, then: Callable[[], None]) -> None:
        """Do `then` when as much as pays of a request's tokens has come from the store; at once if there is nothing to wait for."""
        request = _Request(generate, then)
        if generate.params.prompt_logprobs is None or generate.output:  # else every row is computed
            tails = {tuple(output): choice for choice, output in generate.choices.items()}
            for choice in tails.values():
                self._begin(request, choice)
        if not request.waiting:
            then()

    def hurry(self, request_id: str) -> None:
        """Somebody has something to say of a request, which therefore waits no longer."""
        for key, text in list(self._texts.items()):
            if text.request.generate.request_id == request_id:
                text.fetch.cancel()
                self._end(key)

    def hurry_all(self) -> None:
        for request_id in {text.request.generate.request_id for text in self._texts.values()}:
            self.hurry(request_id)

    def fetched(self, key: Hashable) -> None:
        """As it was posted."""
        if key in self._texts:
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
        # Those that have given way are looked for when their fetch ends.
        self._engine.transit.lost.clear()

    def stats(self) -> StoreStats:
        return StoreStats(waiting=len(self), fetched_tokens=self._tokens, counts=self._store.counts())

    def close(self) -> None:
        """Store for a while what was kept, and end all threads."""
        self._store.close(AT_THE_END)

    def _begin(self, request: _Request, choice: int, most: int | None = None) -> None:
        """Have blocks of one choice's text brought, if there may be any. most: how many of the text's; None: all."""
        generate, key = request.generate, ("store", next(self._numbers))
        tokens = generate.prompt + generate.output.get(choice, [])
        stop = len(tokens) // BLOCK if most is None else most
        try:
            have = self._engine.reserve(key, generate, choice) if stop else None
        except TokenmillError:  # which who adds it will tell
            return
        if have is None:
            return
        first = have // BLOCK
        place = self._engine.transit.place(key, stop * BLOCK) if first < stop else None
        if place is None:
            self._engine.transit.release(key)
            return
        hashes = block_hashes(tokens[: stop * BLOCK], generate.cache_salt, self._engine.info.fingerprint)
        wanted = Wanted(
            scope=self._scope(generate.cache_salt),
            keys=hashes[first:],
            parent=hashes[first - 1] if first else NO_PARENT,
            sizes=self._bytes.sizes,
            block_tokens=BLOCK,
            take=self._taker(place, first, self._engine.transit.gate(key)),
            done=lambda taken: self._post(key),
            deadline=self._clock.now() + LONGEST_WAIT,
        )
        request.waiting += 1
        self._texts[key] = _Text(request, choice, first, stop, self._store.fetch(wanted), most is not None)

    def _taker(self, place: Place, first: int, gate: Gate) -> Callable[[int, memoryview], bool]:
        """What a thread of the store does with blocks, from the text's block `first` on."""

        def frames(of_group: Sequence[int], block: int) -> list[int]:
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
        text = self._texts.pop(key)
        request, taken, transit = text.request, text.fetch.taken, self._engine.transit
        missing = text.first + taken < text.stop
        if key in transit:  # it may have given way to sequences that run
            if taken and not (missing and self._slides):
                self._tokens += (text.first + taken) * BLOCK - transit.there(key)
                transit.land(key, (text.first + taken) * BLOCK)
            transit.release(key)
        request.waiting -= 1
        if taken and missing and self._slides and not text.again and not text.fetch.cancelled:
            # Of windows only what is seen from the end was brought, which is now another one.
            self._begin(request, text.choice, text.first + taken)
        if not request.waiting:
            request.then()

    def _scope(self, salt: str) -> Scope:
        return Scope.of(self._engine.info.fingerprint, salt)


def open_stock(config: KVStoreConfig, engine: Engine, post: Callable[[Hashable], None]) -> Stock:
    """A worker's stock, in the store that its settings name. Raises `ConfigError`."""
    policy = StorePolicy(remote=RemotePolicy(ttl=config.ttl), disk=DiskPolicy(limit=int(config.folder_gb * 2**30)))
    folder = None if config.folder is None else Path(config.folder)
    block_bytes = BlockBytes(engine.memory, engine.windows).sizes[0]
    return Stock(engine, KVStore.open(config.url, folder, block_bytes, policy), post)
