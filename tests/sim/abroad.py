"""Other engines, as a world sees them: they have computed prompts whose keys are brought here, and read what is computed here."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenmill.core.types import FRAME
from tokenmill.engine.transit import Place, Transit
from tokenmill.scheduler.sequence import Sequence


@dataclass
class Bringing:
    """keys: per group, of all positions, as the other engine has them."""

    prompt: list[int]
    salt: str
    keys: list[list[int]]


@dataclass
class Reading:
    """keys: per group, what the leased frames must hold until the lease ends."""

    place: Place
    keys: list[list[int]]


class Abroad:
    """Keys that come and go at random. memory: of the world's frames, a list of 8 keys each."""

    def __init__(self, rng: random.Random, transit: Transit, memory: list[list[int]]) -> None:
        self.landed = self.leased = self.lost = 0
        self._rng = rng
        self._transit = transit
        self._memory = memory
        self._bringing: dict[str, Bringing] = {}
        self._reading: dict[str, Reading] = {}
        self._count = 0

    def reserve(self, prompt: list[int], salt: str, keys: list[list[int]], spare: int) -> None:
        """Begin to bring a prompt, if there is room."""
        self._count += 1
        key = f"bringing {self._count}"
        if self._transit.reserve(key, prompt, salt, spare) is not None:
            self._bringing[key] = Bringing(prompt, salt, keys)

    def lease(self, one: Sequence, keys: list[list[int]]) -> None:
        """Read what a running sequence has computed, or some of it."""
        stop = one.computed // FRAME * FRAME
        start = self._rng.randrange(0, stop + 1, FRAME)
        if start == stop:
            return
        self._count += 1
        key = f"reading {self._count}"
        place = self._transit.lease(key, one.token_ids, one.cache_salt, start, stop)
        if place is not None:
            self._reading[key] = Reading(place, keys)
            self.leased += 1

    def go_on(self) -> list[Bringing]:
        """A piece of some prompts comes, some readers are done; returns the prompts of which nothing more comes."""
        over: list[Bringing] = []
        for key in self._transit.lost:
            self.lost += 1
            self._reading.pop(str(key), None)
            if key in self._bringing:
                over.append(self._bringing.pop(str(key)))
        self._transit.lost.clear()
        for key in [key for key in self._bringing if self._rng.random() < 0.4]:
            if not self._bring(key):
                self._transit.release(key)
                over.append(self._bringing.pop(key))
        for key in [key for key in self._reading if self._rng.random() < 0.2]:
            self._read(self._reading.pop(key))
            self._transit.release(key)
        return over

    def _bring(self, key: str) -> bool:
        """Whether more may come."""
        one = self._bringing[key]
        there = self._transit.there(key)
        stop = min(there + FRAME * self._rng.randint(1, 5), len(one.prompt) // FRAME * FRAME)
        if stop <= there or (place := self._transit.place(key, stop)) is None:
            return False
        fails = self._rng.random() < 0.1  # what has been written by then is of no use
        for keys, frames in zip(one.keys, place.frames, strict=True):
            for at, frame in enumerate(frames):
                if frame >= 0:
                    first = place.start + FRAME * at
                    self._memory[frame][:] = [0] * FRAME if fails else keys[first : first + FRAME]
        if fails:
            return False
        self._transit.land(key, stop)
        self.landed += 1
        return True

    def _read(self, one: Reading) -> None:
        for keys, frames in zip(one.keys, one.place.frames, strict=True):
            for at, frame in enumerate(frames):
                first = one.place.start + FRAME * at
                assert frame < 0 or self._memory[frame] == keys[first : first + FRAME], "what is leased has changed"
