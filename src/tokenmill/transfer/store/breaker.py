"""Whether it is worth speaking to something that has failed: not for a while, which grows as it goes on failing."""

from __future__ import annotations

import enum
import threading

import msgspec

from tokenmill.core.clock import Clock


class State(enum.StrEnum):
    """CLOSED: go on. OPEN: nobody tries. HALF_OPEN: one try is under way, on which it depends."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. first: after the first failure; each further one doubles it, up to `longest`."""

    first: float = 0.25
    longest: float = 30.0

    def after(self, failures: int) -> float:
        return min(self.first * 2.0 ** min(failures - 1, 60), self.longest)


class Breaker:
    """One state, for all threads.

    A single failure opens it: what fails costs whoever waits for it a timeout. Only a success while it is closed forgets earlier failures,
    so that something which answers a try and then fails at real work is left alone for longer each time.
    """

    def __init__(self, clock: Clock, backoff: Backoff) -> None:
        self._clock = clock
        self._backoff = backoff
        self._lock = threading.Lock()
        self._state = State.CLOSED
        self._failures = 0
        self._until = 0.0

    @property
    def state(self) -> State:
        return self._state

    @property
    def closed(self) -> bool:
        return self._state is State.CLOSED

    @property
    def remaining(self) -> float:
        """Seconds until a try is admitted."""
        return max(0.0, self._until - self._clock.now())

    def admits(self) -> bool:
        """Whether to go on. If it is not closed, but its time is over, the caller is the one who tries, and tells how it went."""
        with self._lock:
            if self._state is State.OPEN and self._clock.now() >= self._until:
                self._state = State.HALF_OPEN
                return True
            return self._state is State.CLOSED

    def succeeded(self) -> None:
        with self._lock:
            if self._state is State.CLOSED:
                self._failures = 0
            elif self._state is State.HALF_OPEN:
                self._state = State.CLOSED

    def failed(self) -> int:
        """Returns how many times in a row it has opened now; 0 if it was open, so that this came from something begun before."""
        with self._lock:
            if self._state is State.OPEN:
                return 0
            self._state = State.OPEN
            self._failures += 1
            self._until = self._clock.now() + self._backoff.after(self._failures)
            return self._failures
