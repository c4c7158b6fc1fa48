"""The workers of one model: processes of this host that are kept alive, those of other hosts that have joined, and the dispatcher that
gives them work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from tokenmill.cluster.course import CoursePolicy
from tokenmill.cluster.dispatcher import Dispatcher, Member
from tokenmill.cluster.division import WorkerPlan
from tokenmill.cluster.fleet import Fleet
from tokenmill.cluster.guests import Guests
from tokenmill.cluster.health import HealthPolicy
from tokenmill.cluster.nursery import WORKER_COMMAND, Nursery
from tokenmill.cluster.router import RouterPolicy
from tokenmill.cluster.separation import SeparationPolicy
from tokenmill.cluster.supervisor import RestartPolicy, State, Supervisor
from tokenmill.core.clock import MonotonicClock
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDied, InvalidRequest, TokenmillError, Unavailable
from tokenmill.core.joining import Join
from tokenmill.core.messages import EngineInfo, Generate, SequenceOutput
from tokenmill.core.roles import Role
from tokenmill.core.types import FinishReason
from tokenmill.observe.engines import EngineStats
from tokenmill.observe.separation import PDMetrics
from tokenmill.worker.client import EngineClient

REMOVED_WITHIN = 10.0
"""Seconds for a worker that has nothing to do to end."""

LOOK_EVERY = 0.1
"""Seconds between looks for workers that could not be started again; which ones there are may change meanwhile."""

_SHUT_DOWN = "the server shut down before the answer was complete: send the request again, elsewhere or later"


class Cluster:
    """Workers of one model, from `start` to `stop`: those of this host are kept alive, and those of others come in as long as it lasts.
    metrics: of the requests that they answer."""

    def __init__(
        self,
        config: EngineConfig,
        plans: Sequence[WorkerPlan],
        *,
        command: Sequence[str] = WORKER_COMMAND,
        policy: RestartPolicy | None = None,
        course: CoursePolicy | None = None,
        router: RouterPolicy | None = None,
        health: HealthPolicy | None = None,
        separation: SeparationPolicy | None = None,
        joining: bool = False,
    ) -> None:
        """config: of what is loaded for all of this host, by as many threads as all have together. command: starts the nursery.
        joining: whether workers of other hosts may be let in."""
        assert plans or joining, "no worker"
        self.model = config.name
        self._nursery = Nursery(config, command)
        clock = MonotonicClock()
        fleet = Fleet(clock, router=router, health=health, separation=separation)
        self.metrics = PDMetrics()
        self._dispatcher = Dispatcher(fleet, clock, self._expects, self.metrics, course)
        self._plans = list(plans)
        self._supervisors = {plan.name: self._supervisor(plan, policy) for plan in plans}
        names = {plan.name for plan in plans}
        self._guests = Guests(self._dispatcher, names, self._join, policy) if joining else None
        self._watching: list[asyncio.Task[None]] = []
        self._state = State.LOADING
        self._info: EngineInfo | None = None
        self._answerable = asyncio.Event()
        self._last: dict[str, EngineStats] = {}

    def _join(self, name: str, role: Role, info: EngineInfo, client: EngineClient) -> None:
        self._dispatcher.join(name, role, info, client)
        if role.takes(Role.MIXED):
            self._info = info
            self._answerable.set()

    def _supervisor(self, plan: WorkerPlan, policy: RestartPolicy | None) -> Supervisor:
        def on_ready(info: EngineInfo, client: EngineClient) -> None:
            self._join(plan.name, plan.role, info, client)

        return Supervisor(plan.config, self._nursery.spawn, name=plan.name, on_ready=on_ready, policy=policy)

    @property
    def state(self) -> State:
        """`DOWN`: no worker could take a request now."""
        if self._state is State.READY and not self._dispatcher.can_serve(self.model):
            return State.DOWN
        return self._state

    @property
    def advancing(self) -> bool:
        """Whether a worker that could take a request has said something lately."""
        if self.state is not State.READY:
            return False
        # A guest that does not move is no longer counted on, so that one that is there does.
        return any(supervisor.advancing for supervisor in self._supervisors.values()) or bool(self._guests and self._guests.members)

    @property
    def workers(self) -> dict[str, EngineInfo]:
        """Those that are there now, by name."""
        there = {member.process.name: member.info for member in self._dispatcher.members}
        return {name: there[name] for name in (*self._supervisors, *there) if name in there}

    @property
    def names(self) -> list[str]:
        """Of the workers that there are, or are to be again."""
        return list(dict.fromkeys((*self._supervisors, *self.workers)))

    @property
    def restarts(self) -> int:
        """Times that a worker's process was replaced."""
        return sum(supervisor.restarts for supervisor in self._supervisors.values())

    @property
    def info(self) -> EngineInfo:
        """Of the worker that takes the longest requests, the latest one if there is none now. Raises `Unavailable` before any is there."""
        answering = self._dispatcher.answering(self.model)
        info = max(answering, key=lambda info: info.max_model_len) if answering else self._info
        if info is None:
            raise Unavailable(self._nobody_yet)
        return info

    async def start(self) -> EngineInfo:
        """Load all workers of this host and keep them running from here on. Returns when requests can be answered.
        Raises what made a load fail; it is not tried again."""
        self._watching.append(asyncio.create_task(self._dispatcher.watch(), name="watch"))
        if self._guests is not None:
            self._watching.append(asyncio.create_task(self._guests.watch(), name="watch guests"))
        loading = [asyncio.create_task(supervisor.start()) for supervisor in self._supervisors.values()]
        try:
            await asyncio.gather(*loading)
        finally:
            for task in loading:
                task.cancel()
            await asyncio.gather(*loading, return_exceptions=True)
        await self._answerable.wait()
        if self._state is State.LOADING:
            self._state = State.READY
        return self.info

    async def failed(self) -> TokenmillError:
        """Return, with the reason of one, when no worker could be started again, and none can join. Requests have ended then."""
        while True:
            if self._guests is None and (failure := self._failure()) is not None:
                self._dispatcher.fail_all(_given_up(failure))
                return failure
            await asyncio.sleep(LOOK_EVERY)

    def _failure(self) -> TokenmillError | None:
        """Why one could not be started again, if all workers of this host are given up."""
        failures = [supervisor.failure for supervisor in self._supervisors.values()]
        return failures[0] if failures and all(failures) else None

    def require_ready(self) -> None:
        """Raises `Unavailable` if no worker could take a request now, saying why."""
        if self._state is State.DRAINING:
            raise Unavailable("the server is shutting down and takes no new requests: use another one, or wait for its restart")
        if self._state is State.LOADING:
            raise Unavailable(self._nobody_yet)
        if not self._dispatcher.can_serve(self.model):
            if not self._supervisors:
                raise Unavailable("no worker that could answer is there: try again when one has joined")
            if (failure := self._failure()) is not None:
                raise _given_up(failure)
            raise Unavailable("the engine is down and being restarted: try again shortly")

    @property
    def _nobody_yet(self) -> str:
        if self._supervisors:
            return "the model is loading: try again shortly"
        return "no worker has joined yet: start one with tokenmill worker, or try again shortly"

    def generate(self, *requests: Generate, session: str | None = None) -> AsyncGenerator[SequenceOutput, None]:
        """As `Dispatcher.generate`."""
        return self._dispatcher.generate(self.model, requests, session)

    def abort(self, request_id: str, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """As `Dispatcher.abort`."""
        self._dispatcher.abort(request_id, choice, reason)

    async def stats(self, within: float) -> list[EngineStats]:
        """The counters of the workers, as fresh as they can give them in so many seconds; of those that are started again, the last."""
        members = list(self._dispatcher.members)

        async def ask(client: EngineClient) -> None:
            with contextlib.suppress(TimeoutError, EngineDied):
                async with asyncio.timeout(within):
                    await client.stats()

        await asyncio.gather(*(ask(member.client) for member in members))
        self._last = {name: last._replace(up=False) for name, last in self._last.items() if name in self._supervisors}
        for name, info, stats in ((m.process.name, m.info, m.stats) for m in members if m.stats is not None):
            self._last[name] = EngineStats(name, info, stats, up=True)
        return list(self._last.values())

    def overview(self) -> list[tuple[str, Role, str, Member | None]]:
        """Each worker's name, role and state, and what is known of its process, if it has one that is ready."""
        there = {member.process.name: member for member in self._dispatcher.members}
        found = []
        for plan in self._plans:
            supervisor, member = self._supervisors[plan.name], there.get(plan.name)
            state = supervisor.state.value if member is None else self._dispatcher.state_of(plan.name)
            found.append((plan.name, plan.role, state, member))
        for name in there.keys() - self._supervisors.keys():
            found.append((name, self._dispatcher.role_of(name), self._dispatcher.state_of(name), there[name]))
        return found

    def admit(self, join: Join) -> None:
        """Raises `JoinRefused` for a worker of another host that is not wanted."""
        assert self._guests is not None, "nobody may be let in"
        self._guests.admit(join)

    def welcome(self, join: Join, client: EngineClient) -> None:
        """One that was admitted gets requests from now on."""
        assert self._guests is not None, "nobody may be let in"
        self._guests.welcome(join, client)

    def migrate(self, name: str) -> int:
        """Have other workers go on with what this one decodes; see `Dispatcher.migrate`. Raises `InvalidRequest`."""
        self._require(name)
        return self._dispatcher.migrate(name)

    async def remove(self, name: str) -> None:
        """End a worker for good, when others have gone on with what it has, and it has handed over what it was to.

        Raises `InvalidRequest` if there is none of that name on this host, or no other that answers requests.
        """
        self._require(name)
        if name not in self._supervisors:
            what = "has joined from elsewhere: end its process there, and it leaves in the same way"
            raise InvalidRequest(f"worker {name!r} {what}", param="name")
        boot = self.workers[name].boot
        if all(info.boot == boot for info in self._dispatcher.answering(self.model)):
            raise InvalidRequest(
                f"worker {name!r} is the only one that answers requests for {self.model!r}: start another one first", param="name"
            )
        supervisor = self._supervisors[name]
        supervisor.begin_drain()
        await self._dispatcher.drain(name)
        await supervisor.stop(REMOVED_WITHIN)
        self._plans = [plan for plan in self._plans if plan.name != name]
        self._supervisors.pop(name, None)  # it may have been asked for twice

    def _require(self, name: str) -> None:
        if name not in self.names:
            raise no_such_worker(name, self.names)
        if name not in self.workers:
            raise Unavailable(f"worker {name!r} is being started: try again shortly")

    def begin_drain(self) -> None:
        """Take no new requests; those in flight go on."""
        self._state = State.DRAINING

    async def stop(self, timeout: float) -> None:
        """Give the workers `timeout` seconds to finish what they have, then kill them. No process is left when this returns."""
        self.begin_drain()
        stopping = [supervisor.stop(timeout) for supervisor in self._supervisors.values()]
        parting = [] if self._guests is None else [self._guests.part(timeout)]
        await asyncio.gather(*parting, *stopping)
        await self._nursery.close()
        self._dispatcher.fail_all(Unavailable(_SHUT_DOWN))
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def kill(self) -> None:
        """End all processes now, from any context; for a second signal."""
        for supervisor in self._supervisors.values():
            supervisor.kill()

    def _expects(self, model: str) -> bool:
        return any(one.state in (State.LOADING, State.DOWN) and one.failure is None for one in self._supervisors.values())


def _given_up(failure: TokenmillError) -> Unavailable:
    return Unavailable(f"the engine is down and could not be started again: {failure}")


def no_such_worker(name: str, known: Sequence[str]) -> InvalidRequest:
    return InvalidRequest(f"there is no worker {name!r}, only {', '.join(known)}", param="name")
