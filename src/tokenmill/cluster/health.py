"""Which workers move: judged by what each says of itself, and by whether its work goes on.

A worker that answers but does not advance is no healthier than one that is silent. And what a worker says about *another* is no
observation: nothing that happens to a peer can make a worker unhealthy, since there is no way by which it could be told here. Who is to
blame for a hand-over that failed is `blame`'s affair, and it counts in breaker.py.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import msgspec

from tokenmill.core.clock import Clock
from tokenmill.core.errors import ConfigError


class State(enum.StrEnum):
    """HEALTHY: gets work. SUSPECT: gets work if no other can. UNHEALTHY: gets none, and what it has is to go elsewhere, until it moves
    again. GONE: its stream has ended; only a new process comes back."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    GONE = "gone"


_FROM_BEST = list(State)


class HealthPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, and all in proportion to `health_check_interval`, of which no state is wrong for longer than twice.

    step_margin: a step is no hang before it has taken so many times what it should. assumed_speed: prompt tokens per second of a worker
    that has not been measured: with the margin as long as a chunk of 512 takes on a slow and busy machine, a minute.
    """

    health_check_interval: float = 5.0
    step_margin: float = 4.0
    assumed_speed: float = 32.0

    def __post_init__(self) -> None:
        for name in ("health_check_interval", "step_margin", "assumed_speed"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be above 0", param=name)

    @property
    def tick(self) -> float:
        """How often `HealthMonitor.tick` is to be called."""
        return 0.2 * self.health_check_interval

    @property
    def suspect_after(self) -> float:
        """Without a sign of life, or of progress where there is work."""
        return 0.8 * self.health_check_interval

    @property
    def unhealthy_after(self) -> float:
        """Likewise. Progress that is asked for is seen at most two ticks after it was made, and its absence is looked for once a tick: with
        both, less than two intervals."""
        return 1.2 * self.health_check_interval

    def patience(self, signs: Signs) -> float:
        """By how much both are longer while a step may be under way: it should take as long as its rows do at the measured speed, or as
        half of the last ones did, since even a step of one row reads all weights. A single one may have been a hang."""
        if not signs.rows:
            return 1.0
        usual = median_low(signs.last_steps) if len(signs.last_steps) > 1 else 0.0
        expected = max(signs.rows / (signs.speed or self.assumed_speed), usual)
        return max(1.0, self.step_margin * expected / self.unhealthy_after)


@dataclass(slots=True)
class Signs:
    """What was last seen of one process. Times are the clock's.

    advanced_at: when a step of it was last known to have finished, or its work to have begun. told_at, counted_at: when it last told
    anything of steps, and its counter. asked: for its counter, and has not answered. rows: of the largest step that may be under way since
    it advanced. speed: rows per second, if measured. last_steps: seconds that each took. working: there is something that it should
    be doing. hung: it was found to stand still, and has not moved since.
    """

    boot: str
    heard_at: float
    advanced_at: float
    told_at: float
    counted_at: float
    asked: bool = False
    steps: int = 0
    rows: int = 0
    speed: float | None = None
    last_steps: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    working: bool = False
    hung: bool = False
    ended: bool = False


class Verdict(NamedTuple):
    """A state and, unless it is healthy, why."""

    state: State
    reason: str = ""


class Change(NamedTuple):
    """A worker's state is another than it was."""

    worker_id: str
    before: State
    after: State
    reason: str


def judge(signs: Signs, now: float, policy: HealthPolicy) -> Verdict:
    """The whole rule, of one worker at one time."""
    if signs.ended:
        return Verdict(State.GONE, "its stream has ended")
    silent = now - signs.heard_at
    still = now - signs.advanced_at if signs.working or signs.hung else 0.0
    worst = max(silent, still)
    patience = policy.patience(signs)
    if worst < policy.suspect_after * patience:
        return Verdict(State.HEALTHY)
    what = f"it has said nothing for {silent:.1f} s" if silent >= still else f"it has work, but has not advanced for {still:.1f} s"
    state = State.SUSPECT if worst < policy.unhealthy_after * patience else State.UNHEALTHY
    return Verdict(state, f"{what} (limit {policy.unhealthy_after * patience:.1f} s)")


class HealthMonitor:
    """The states of all workers. It is told what is seen as it is seen, and `tick` is called every `policy.tick` seconds.

    News of a process that another has replaced (its boot differs) and of workers that are not there changes nothing.
    """

    def __init__(self, clock: Clock, policy: HealthPolicy | None = None) -> None:
        self._clock = clock
        self.policy = policy or HealthPolicy()
        self._signs: dict[str, Signs] = {}
        self._ailing: dict[str, Verdict] = {}
        self._changes: list[Change] = []
        self._ticked_at = clock.now()

    @property
    def ailing(self) -> Mapping[str, Verdict]:
        """Those that are not healthy: mostly none, so that who chooses among many looks here first."""
        return self._ailing

    def verdict(self, worker_id: str) -> Verdict:
        """As of the last observation or tick. A worker that is not there is gone."""
        if worker_id not in self._signs:
            return Verdict(State.GONE, "it has left")
        return self._ailing.get(worker_id, Verdict(State.HEALTHY))

    def join(self, worker_id: str, boot: str) -> None:
        """A process has presented itself: it is healthy until it shows otherwise."""
        now = self._clock.now()
        self._signs[worker_id] = Signs(boot, now, now, now, now)
        self._settle(worker_id)

    def leave(self, worker_id: str) -> None:
        self._signs.pop(worker_id, None)
        self._ailing.pop(worker_id, None)

    def heard(self, worker_id: str, boot: str) -> None:
        """Something came that says nothing about steps."""
        if signs := self._of(worker_id, boot):
            signs.heard_at = self._clock.now()
            self._recover(worker_id)

    def stepped(self, worker_id: str, boot: str) -> None:
        """The output of a step came, even an empty one."""
        if signs := self._of(worker_id, boot):
            signs.heard_at = signs.told_at = self._clock.now()
            if signs.working:
                signs.last_steps.append(signs.heard_at - signs.advanced_at)
            signs.steps += 1  # its counter will say so too, which is no second advance
            self._advance(signs)
            self._recover(worker_id)

    def counted(self, worker_id: str, boot: str, steps: int, *, idle: bool = False) -> None:
        """Its counter of steps. idle: its engine says that there is nothing now that it could compute: no work, or none that need not wait
        for frames of others. Whoever says so must be the loop that steps, since it counts as an advance."""
        if signs := self._of(worker_id, boot):
            signs.heard_at = signs.told_at = signs.counted_at = self._clock.now()
            signs.asked = False
            if steps > signs.steps or idle:
                self._advance(signs)
            signs.steps = max(steps, signs.steps)
            self._recover(worker_id)

    def working(self, worker_id: str, rows: int, speed: float | None = None) -> None:
        """What it should be doing now. rows: the most that its step can have, prompt tokens and streams (`Load.step_rows`); 0: nothing.
        speed: rows per second, if measured. To be told before each tick."""
        signs = self._signs[worker_id]
        if rows and not signs.working and not signs.hung:
            signs.advanced_at = self._clock.now()
        signs.working = rows > 0
        signs.rows = max(rows, signs.rows)
        signs.speed = speed

    def ended(self, worker_id: str, boot: str) -> None:
        """Its stream has ended, or its process."""
        if signs := self._of(worker_id, boot):
            signs.ended = True
            self._settle(worker_id)

    def tick(self) -> list[Change]:
        """Judge all. Returns what has changed since the last tick, in order.

        Time in which nobody called is not held against anyone: whoever was stopped himself has not seen what others did.
        """
        now = self._clock.now()
        late = now - self._ticked_at - 2 * self.policy.tick
        self._ticked_at = now
        for worker_id, signs in self._signs.items():
            if late > 0:
                signs.heard_at = min(now, signs.heard_at + late)
                signs.advanced_at = min(now, signs.advanced_at + late)
            self._settle(worker_id)
        changes, self._changes = self._changes, []
        return changes

    def to_ask(self) -> list[str]:
        """Workers that are to be asked for their counters now, which `counted` is told: those that have told nothing of steps for a tick,
        or no counters for an interval. Nobody is asked again before he has answered."""
        now = self._clock.now()
        found = []
        for worker_id, signs in self._signs.items():
            due = now - signs.told_at >= self.policy.tick or now - signs.counted_at >= self.policy.health_check_interval
            if due and not signs.asked and not signs.ended:
                signs.asked = True
                found.append(worker_id)
        return found

    def _of(self, worker_id: str, boot: str) -> Signs | None:
        signs = self._signs.get(worker_id)
        return signs if signs is not None and signs.boot == boot else None

    def _advance(self, signs: Signs) -> None:
        signs.advanced_at = self._clock.now()
        signs.rows = 0
        signs.hung = False

    def _recover(self, worker_id: str) -> None:
        """An observation can only make a state better: that time has passed is for `tick` to hold against anyone."""
        before = self._ailing.get(worker_id)
        if before is not None:
            after = judge(self._signs[worker_id], self._clock.now(), self.policy)
            if _FROM_BEST.index(after.state) < _FROM_BEST.index(before.state):
                self._become(worker_id, after)

    def _settle(self, worker_id: str) -> None:
        signs = self._signs[worker_id]
        after = judge(signs, self._clock.now(), self.policy)
        if after.state is State.UNHEALTHY and signs.working:
            signs.hung = True
        self._become(worker_id, after)

    def _become(self, worker_id: str, after: Verdict) -> None:
        before = self._ailing.pop(worker_id, Verdict(State.HEALTHY))
        if after.state is not State.HEALTHY:
            self._ailing[worker_id] = after
        if after.state is not before.state:
            self._changes.append(Change(worker_id, before.state, after.state, after.reason))


class Blame(enum.StrEnum):
    SOURCE = "source"
    TARGET = "target"
    LINK = "link"


def blame(source: State, target: State) -> Blame:
    """Whose breaker counts a hand-over that failed: of the worker that gave frames, of the one that fetched them, or of the link.

    One of them, if it is provably at fault and the other is not: it is gone, or else unhealthy, by what it has itself shown. If both or
    neither are, nothing is proven against a worker, whatever the other says of it, and the link between the two is avoided for a while.
    """
    for proof in ({State.GONE}, {State.GONE, State.UNHEALTHY}):
        if (source in proof) != (target in proof):
            return Blame.SOURCE if source in proof else Blame.TARGET
    return Blame.LINK
