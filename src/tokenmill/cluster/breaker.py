"""Circuit breakers: who has failed several times in a row gets nothing for a while, then one attempt, which decides how it goes on.

A breaker counts what became of attempts; health (health.py) judges whether a worker moves. They are apart because a worker may move
and yet fail each request, and because a request may fail on a worker that is not to blame. Keys are worker ids, and links: pairs of ids
(source, target) between which frames are handed over.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from tokenmill.core.clock import Clock
from tokenmill.core.errors import ConfigError

Link: TypeAlias = tuple[str, str]


class Circuit(enum.StrEnum):
    """CLOSED: all may pass. OPEN: nobody. HALF_OPEN: one attempt is out that decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. failures: in a row, that open a breaker. first_open, longest_open: how long it is open, twice as long each time
    that the attempt after it fails. forgiven_after: closed for so long, it starts at `first_open` again. probe_within: an attempt
    that has told nothing for so long decides nothing, and the next one does."""

    failures: int = 3
    first_open: float = 1.0
    longest_open: float = 60.0
    forgiven_after: float = 60.0
    probe_within: float = 60.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise ConfigError(f"failures is {self.failures}, but must be at least 1", param="failures")
        for name in ("first_open", "longest_open", "forgiven_after", "probe_within"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 0", param=name)

    def open_for(self, times: int) -> float:
        """How long a breaker stays open that opens for the `times`-th time."""
        return min(self.first_open * 2.0 ** min(times - 1, 30), self.longest_open)


@dataclass(slots=True, eq=False)
class Breaker:
    """The state behind one key; only `Breakers` changes it. failures: in a row. times: that it has opened. closed_at, next_at: when it last
    closed, and when the next attempt may begin if it is not closed. turn: grows with each change of state, so that what began before one
    has no say after it."""

    circuit: Circuit = Circuit.CLOSED
    failures: int = 0
    times: int = 0
    closed_at: float = 0.0
    next_at: float = 0.0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """Something that was begun and will end in one of three ways, which `Breakers` is to be told once."""

    key: str | Link
    breaker: Breaker = field(repr=False)
    turn: int
    decides: bool


class Breakers:
    """One breaker per key, closed at first. `forget` is for workers whose process has gone: what began in its time does not count for the
    next one."""

    def __init__(self, clock: Clock, policy: BreakerPolicy | None = None) -> None:
        self._clock = clock
        self._policy = policy or BreakerPolicy()
        self._breakers: dict[str | Link, Breaker] = {}
        self._tripped: dict[str | Link, Breaker] = {}

    @property
    def tripped(self) -> Mapping[str | Link, Breaker]:
        """Those that are not closed: mostly none, so that who chooses among many looks here first."""
        return self._tripped

    def circuit(self, key: str | Link) -> Circuit:
        breaker = self._tripped.get(key)
        return Circuit.CLOSED if breaker is None else breaker.circuit

    def admits(self, key: str | Link) -> bool:
        """Whether an attempt may begin now."""
        breaker = self._tripped.get(key)
        return breaker is None or self._clock.now() >= breaker.next_at

    def begin(self, key: str | Link) -> Attempt:
        """Something begins; if the breaker is not closed but admits it, it is the attempt that decides. What is not admitted may be begun
        by who must, and decides nothing."""
        breaker = self._breakers.setdefault(key, Breaker())
        decides = breaker.circuit is Circuit.CLOSED
        if not decides and self.admits(key):
            self._become(key, breaker, Circuit.HALF_OPEN, self._policy.probe_within)
            decides = True
        return Attempt(key, breaker, breaker.turn, decides)

    def succeeded(self, attempt: Attempt) -> None:
        """It went well, as far as the key is concerned: for a worker, its first token is here, which may be long before the end."""
        if not self._counts(attempt):
            return
        attempt.breaker.failures = 0
        if attempt.breaker.circuit is Circuit.HALF_OPEN:
            self._become(attempt.key, attempt.breaker, Circuit.CLOSED)

    def failed(self, attempt: Attempt) -> None:
        """It failed, and the key is to blame (`health.blame`). Not so when the request was at fault."""
        if not self._counts(attempt):
            return
        breaker = attempt.breaker
        breaker.failures += 1
        if breaker.circuit is Circuit.HALF_OPEN or breaker.failures >= self._policy.failures:
            if breaker.circuit is Circuit.CLOSED and self._clock.now() - breaker.closed_at >= self._policy.forgiven_after:
                breaker.times = 0
            breaker.times += 1
            self._become(attempt.key, breaker, Circuit.OPEN, self._policy.open_for(breaker.times))

    def dropped(self, attempt: Attempt) -> None:
        """It ended without saying anything about the key: cancelled, or another's fault. If it was to decide, the next one does."""
        if self._counts(attempt) and attempt.breaker.circuit is Circuit.HALF_OPEN:
            attempt.breaker.next_at = self._clock.now()

    def forget(self, worker_id: str) -> None:
        """A worker has left, and its links with it."""
        for key in [key for key in self._breakers if key == worker_id or (isinstance(key, tuple) and worker_id in key)]:
            del self._breakers[key]
            self._tripped.pop(key, None)

    def _counts(self, attempt: Attempt) -> bool:
        return attempt.decides and attempt.turn == attempt.breaker.turn and self._breakers.get(attempt.key) is attempt.breaker

    def _become(self, key: str | Link, breaker: Breaker, circuit: Circuit, lasting: float = 0.0) -> None:
        now = self._clock.now()
        breaker.circuit = circuit
        breaker.failures = 0
        breaker.next_at = now + lasting
        breaker.turn += 1
        if circuit is Circuit.CLOSED:
            breaker.closed_at = now
            del self._tripped[key]
        else:
            self._tripped[key] = breaker
