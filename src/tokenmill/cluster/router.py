"""Which worker gets a request: who can take it, then the session's own worker, then the strategy's choice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

import msgspec

from tokenmill.cluster.breaker import Breakers, Link
from tokenmill.cluster.health import HealthMonitor, State
from tokenmill.cluster.load import Load, Loads
from tokenmill.cluster.prefixes import PrefixIndex
from tokenmill.cluster.registry import Registry, Worker
from tokenmill.cluster.strategies import RouteRequest, build_strategy
from tokenmill.core.blocks import BLOCK
from tokenmill.core.errors import ConfigError, ContextLengthExceeded, ModelNotFound, TokenmillError, Unavailable
from tokenmill.core.roles import Role


class RouterPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are spread.

    routing_strategy: one of `strategies.STRATEGIES`. tokens_per_stream: as many prompt tokens does a running stream count for where both
    are weighed. session_slack: a session leaves its worker when that has so many tokens more ahead than the least busy one. sessions: that
    are remembered. prefix_blocks: pairs of a block and a worker that are remembered. seed: of `power_of_two`.
    """

    routing_strategy: str = "min_decode_queue"
    tokens_per_stream: int = 256
    session_slack: int = 8192
    sessions: int = 100_000
    prefix_blocks: int = 200_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("tokens_per_stream", 0), ("session_slack", 0), ("sessions", 1), ("prefix_blocks", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least {least}", param=name)


class Choice(NamedTuple):
    """The worker, and by what it was chosen; or none, and why. `error` is what to raise where there is no other way to go on."""

    worker: Worker | None
    reason: str
    error: type[TokenmillError] = Unavailable

    def found(self) -> Worker:
        """The worker; without one, raises `Unavailable`, `ModelNotFound` or `ContextLengthExceeded` with the reason."""
        if self.worker is None:
            raise self.error(self.reason, param="model" if self.error is ModelNotFound else None)
        return self.worker


NOBODY: frozenset[str] = frozenset()


class Router:
    """Chooses; what is chosen from is others' (registry, loads, health, breakers, prefixes), and is only read.

    A choice is not yet a gift: the caller tells `Loads.give` before the next choice. Raises `ConfigError` for an unknown strategy.
    """

    def __init__(
        self,
        registry: Registry,
        loads: Loads,
        prefixes: PrefixIndex,
        health: HealthMonitor,
        breakers: Breakers,
        policy: RouterPolicy | None = None,
    ) -> None:
        self.policy = policy or RouterPolicy()
        self._registry = registry
        self._loads = loads
        self._prefixes = prefixes
        self._health = health
        self._breakers = breakers
        self._strategy = build_strategy(self.policy.routing_strategy, prefixes, self.policy.tokens_per_stream, self.policy.seed)
        self._sessions: OrderedDict[bytes, str] = OrderedDict()  # the least recently used first
        self._turns: dict[Role, dict[str, int]] = {role: {} for role in Role}
        self._next_turn = count(1)

    def choose(self, request: RouteRequest, wanted: Role, *, excluded: Collection[str] = NOBODY, peer: str | None = None) -> Choice:
        """A worker for a request or a part of one; O(workers).

        excluded: ids that are not to be chosen, such as those where it has failed. peer: the worker at the other end of the hand-over
        (the decode worker if a prefill worker is wanted), so that a link that fails is avoided.
        """
        pool = self._pool(request, wanted, excluded, peer)
        if not pool:
            return self._refusal(request, wanted, excluded)
        load, reason = self._of_session(pool, request, wanted), "session"
        if load is None:
            load, reason = self._strategy.pick(pool, request, wanted, self._turns[wanted]), self.policy.routing_strategy
        self._note(load.worker.id, request, wanted)
        return Choice(load.worker, reason)

    def cached_tokens(self, worker_id: str, request: RouteRequest) -> int:
        """How much of the prompt a worker probably has in its KV cache."""
        return min(BLOCK * self._prefixes.depth(worker_id, request.hashes), request.prompt_tokens)

    def forget(self, worker_id: str) -> None:
        """A worker has left. Its sessions are given another when they come again."""
        for turns in self._turns.values():
            turns.pop(worker_id, None)

    def _pool(self, request: RouteRequest, wanted: Role, excluded: Collection[str], peer: str | None) -> list[Load]:
        """The healthy that can take it, or if there are none, the suspect."""
        ailing, tripped, loads = self._health.ailing, self._breakers.tripped, self._loads.by_worker
        longest = request.longest
        if not ailing and not tripped and not excluded and request.fingerprint is None:
            return [loads[worker.id] for worker in self._registry.takers(request.model, wanted) if worker.max_model_len >= longest]
        healthy, suspect = [], []
        for worker in self._registry.takers(request.model, wanted):
            if worker.id in excluded or worker.max_model_len < longest:
                continue
            if request.fingerprint is not None and worker.fingerprint != request.fingerprint:
                continue
            if tripped and not self._admitted(worker.id, wanted, peer):
                continue
            if worker.id not in ailing:
                healthy.append(loads[worker.id])
            elif ailing[worker.id].state is State.SUSPECT:
                suspect.append(loads[worker.id])
        return healthy or suspect

    def _admitted(self, worker_id: str, wanted: Role, peer: str | None) -> bool:
        return self._breakers.admits(worker_id) and (peer is None or self._breakers.admits(_link(worker_id, wanted, peer)))

    def _of_session(self, pool: list[Load], request: RouteRequest, wanted: Role) -> Load | None:
        """Where the session was, if that worker is in the pool, has room, and is not much busier than others."""
        if request.session is None:
            return None
        home = self._sessions.get(_session(request, wanted))
        load = self._loads.by_worker.get(home) if home is not None else None
        if load is None or load not in pool:
            return None
        missing = request.prompt_tokens - self.cached_tokens(load.worker.id, request)
        if load.lacks_room(missing):
            return None
        weight = self.policy.tokens_per_stream
        least = min([other.queued_prompt_tokens + weight * other.streams for other in pool])
        return load if load.queued_prompt_tokens + weight * load.streams - least <= self.policy.session_slack else None

    def _note(self, worker_id: str, request: RouteRequest, wanted: Role) -> None:
        self._turns[wanted][worker_id] = next(self._next_turn)
        if request.session is not None:
            key = _session(request, wanted)
            self._sessions[key] = worker_id
            self._sessions.move_to_end(key)
            if len(self._sessions) > self.policy.sessions:
                self._sessions.popitem(last=False)

    def _refusal(self, request: RouteRequest, wanted: Role, excluded: Collection[str]) -> Choice:
        """Why the pool is empty."""
        if request.model not in (models := self._registry.models()):
            served = f"served here: {', '.join(models)}" if models else "no worker has joined yet"
            return Choice(None, f"no worker serves model {request.model!r}: {served}", ModelNotFound if models else Unavailable)
        known = self._registry.of_role(request.model, wanted)
        role = "decode or mixed" if wanted is Role.MIXED else wanted.value
        if not known:
            return Choice(None, f"model {request.model!r} has no {role} worker: start one, or wait until one joins")
        largest = max(worker.max_model_len for worker in known)
        if largest < request.longest:
            what = f"prompt ({request.prompt_tokens} tokens) and output (up to {request.max_tokens}) exceed the longest context"
            return Choice(None, f"{what} of a {role} worker, {largest}: shorten the prompt or lower max_tokens", ContextLengthExceeded)
        obstacles: dict[str, int] = {}
        for worker in known:
            obstacle = self._obstacle(worker, request, excluded)
            obstacles[obstacle] = obstacles.get(obstacle, 0) + 1
        found = ", ".join(f"{number} {obstacle}" for obstacle, number in obstacles.items())
        return Choice(None, f"no {role} worker can take a request for {request.model!r} now ({found}): try again shortly")

    def _obstacle(self, worker: Worker, request: RouteRequest, excluded: Collection[str]) -> str:
        if self._registry.is_draining(worker.id):
            return "draining"
        if worker.max_model_len < request.longest:
            return "of a shorter context"
        if request.fingerprint is not None and worker.fingerprint != request.fingerprint:
            return "of another fingerprint"
        state = self._health.verdict(worker.id).state
        if state not in (State.HEALTHY, State.SUSPECT):
            return state.value
        if worker.id in excluded:
            return "tried already"
        return "failing lately"


def _session(request: RouteRequest, wanted: Role) -> bytes:
    """A short name of it, since callers choose its text and length. Whoever decodes for a session has its KV, be it of whole requests or
    of hand-overs, so that these are one; its prompts' KV elsewhere is another."""
    texts = (request.model, Role.PREFILL if wanted is Role.PREFILL else Role.DECODE, request.session or "")
    return blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _link(worker_id: str, wanted: Role, peer: str) -> Link:
    return (worker_id, peer) if wanted is Role.PREFILL else (peer, worker_id)
