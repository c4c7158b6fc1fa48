"""All that is known of the workers, so that who joins or leaves does so everywhere at once."""

from __future__ import annotations

from tokenmill.cluster.breaker import BreakerPolicy, Breakers
from tokenmill.cluster.health import Change, HealthMonitor, HealthPolicy, State
from tokenmill.cluster.load import Key, Loads
from tokenmill.cluster.prefixes import PrefixIndex
from tokenmill.cluster.registry import Registry, Worker
from tokenmill.cluster.router import Router, RouterPolicy
from tokenmill.cluster.separation import Decision, Separation, SeparationPolicy, Side
from tokenmill.cluster.strategies import RouteRequest
from tokenmill.core.clock import Clock


class Fleet:
    """The parts are public: each is told what concerns it alone. What concerns several is told here."""

    def __init__(
        self,
        clock: Clock,
        *,
        router: RouterPolicy | None = None,
        health: HealthPolicy | None = None,
        breaker: BreakerPolicy | None = None,
        separation: SeparationPolicy | None = None,
    ) -> None:
        router = router or RouterPolicy()
        self.registry = Registry()
        self.loads = Loads()
        self.prefixes = PrefixIndex(router.prefix_blocks)
        self.health = HealthMonitor(clock, health)
        self.breakers = Breakers(clock, breaker)
        self.separation = Separation(clock, separation)
        self.router = Router(self.registry, self.loads, self.prefixes, self.health, self.breakers, router)

    def join(self, worker: Worker) -> list[Key]:
        """A process presents itself and has nothing yet. Returns the parts of requests that were on the one whose place it takes."""
        self._forget(worker.id)
        lost = self.loads.join(worker)
        self.registry.join(worker)
        self.health.join(worker.id, worker.boot)
        return lost

    def leave(self, worker_id: str, boot: str) -> list[Key]:
        """A process is gone for good. Returns the parts of requests that were there, which are to be done elsewhere; none if another
        process has taken its place already."""
        if self.registry.leave(worker_id, boot) is None:
            return []
        self._forget(worker_id)
        self.health.leave(worker_id)
        return self.loads.leave(worker_id)

    def tick(self) -> list[Change]:
        """To be called every `HealthPolicy.tick` seconds: judges all workers by the work that they have. Returns what has changed."""
        for worker in self.registry:
            rows = self.loads.by_worker[worker.id].step_rows
            self.health.working(worker.id, rows, self.separation.prefill_speed(worker.id))
        return self.health.tick()

    def decide(self, request: RouteRequest, prefill_id: str, decode_id: str, bytes_per_token: int, have: int | None = None) -> Decision:
        """Whether a request is separated between two workers that were chosen for it, or goes whole to the second. have: tokens of its
        prompt that the second has cached; None: as many as is thought."""
        prefill, decode = self._side(prefill_id, request), self._side(decode_id, request)
        if have is not None:
            decode = decode._replace(cached_tokens=have)
        return self.separation.decide(request.prompt_tokens, prefill, decode, bytes_per_token)

    def state(self, worker_id: str) -> State:
        return self.health.verdict(worker_id).state

    def _side(self, worker_id: str, request: RouteRequest) -> Side:
        load, cached = self.loads.by_worker[worker_id], self.router.cached_tokens(worker_id, request)
        return Side(worker_id, cached, load.queued_prompt_tokens, load.streams, load.worker.chunk_size)

    def _forget(self, worker_id: str) -> None:
        self.prefixes.leave(worker_id)
        self.breakers.forget(worker_id)
        self.separation.forget(worker_id)
        self.router.forget(worker_id)
