"""Time as a value that is passed in, so that every policy can run under a simulated clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic axis; only differences mean anything."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's own monotonic clock, comparable between processes of one host."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self._now += seconds
