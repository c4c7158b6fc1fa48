"""How fast things go, as measured: tokens computed per second by worker, bytes per second by pair of workers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tokenmill.core.clock import Clock

HALF_LIFE = 60.0
"""Seconds after which a measurement counts half. Who is thought to be slow gets no work and so no measurements: so he comes back."""

OUTLIER = 4.0
"""A measurement that took so many times what it should have was disturbed, and counts as this many times. A true change is followed in
a few measurements all the same."""


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Sums:
    amount: float = 0.0
    seconds: float = 0.0
    at: float = 0.0

    def fade(self, now: float) -> None:
        share = 0.5 ** ((now - self.at) / HALF_LIFE)
        self.amount, self.seconds, self.at = self.amount * share, self.seconds * share, now


class Rates(Generic[K]):
    """Amounts per second, by key: measured amounts over measured seconds, so that large measurements count for more, both fading with
    time towards what all keys together have shown, and that towards `default`. What is expected beforehand counts as much as measurements
    of `worth` seconds."""

    def __init__(self, clock: Clock, default: float, worth: float) -> None:
        assert default > 0, f"a rate of {default}"
        assert worth > 0, f"a default worth {worth} seconds"
        self._clock = clock
        self._default = default
        self._worth = worth
        self._all = _Sums()
        self._by_key: dict[K, _Sums] = {}

    def observe(self, key: K, amount: float, seconds: float) -> None:
        """So much took so long. Nothing, or nothing in no time, says nothing about a rate."""
        if amount <= 0 or seconds <= 0:
            return
        now = self._clock.now()
        if key in self._by_key:
            seconds = min(seconds, OUTLIER * amount / self.of(key))
        for sums in (self._all, self._by_key.setdefault(key, _Sums(at=now))):
            sums.fade(now)
            sums.amount += amount
            sums.seconds += seconds

    def of(self, key: K) -> float:
        """What to expect of a key, known or not."""
        now = self._clock.now()
        overall = self._blend(self._all, self._default, now)
        sums = self._by_key.get(key)
        return overall if sums is None else self._blend(sums, overall, now)

    def measured(self, key: K) -> bool:
        """Whether anything was measured of a key."""
        return key in self._by_key

    def forget(self, key: K) -> None:
        self._by_key.pop(key, None)

    def __iter__(self) -> Iterator[K]:
        """What was measured; `forget` may be called meanwhile."""
        return iter(list(self._by_key))

    def _blend(self, sums: _Sums, expected: float, now: float) -> float:
        sums.fade(now)
        return (sums.amount + self._worth * expected) / (sums.seconds + self._worth)
