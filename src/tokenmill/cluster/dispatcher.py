"""Carries out what the courses of requests want done: finds workers for them, and passes on what is said.

Who is chosen is the fleet's affair (docs/routing.md), what comes next that of each course (docs/handover.md). Everything happens in one
event loop, so that what is counted of loads is true whenever a worker is chosen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tokenmill.cluster.course import Course, CoursePolicy, Deliver, Effect, Fail, NeedDecode, NeedPrefill, Process, Send
from tokenmill.cluster.feed import Feed
from tokenmill.cluster.fleet import Fleet
from tokenmill.cluster.health import State
from tokenmill.cluster.ledger import Ledger, Part
from tokenmill.cluster.registry import Worker
from tokenmill.cluster.separation import must_stay_whole
from tokenmill.cluster.strategies import RouteRequest
from tokenmill.core.blocks import block_hashes
from tokenmill.core.clock import Clock
from tokenmill.core.errors import ModelBroken, TokenmillError
from tokenmill.core.handover import Cached, FromWorker, Ready, Refused, Reserve, Reserved, Start, Taken, ToWorker
from tokenmill.core.messages import EngineInfo, Failed, Generate, Leaving, SequenceOutput, Stats, StepOutput
from tokenmill.core.roles import Role
from tokenmill.core.types import FinishReason
from tokenmill.observe.separation import PDMetrics, RequestTimes
from tokenmill.worker.client import EngineClient

log = logging.getLogger(__name__)

HOLD = 30.0
"""Seconds for which a request that has lost its worker waits for another one if none is known to be on its way."""


@dataclass(slots=True, eq=False)
class Member:
    """A worker that has joined. stats: the counters last heard."""

    process: Process
    info: EngineInfo
    client: EngineClient
    stats: Stats | None = None


@dataclass(slots=True, eq=False)
class _Live:
    """A request that is worked on. held: since when, and for what, it waits for a worker. heard: whose tokens were the last. cut: when a
    worker was lost that had put out tokens, for each choice that is still to be gone on with."""

    generate: Generate
    route: RouteRequest
    course: Course
    feed: Feed
    times: RequestTimes
    decode: Part | None = None
    prefill: Part | None = None
    reserved_at: float = 0.0
    held: tuple[float, NeedDecode] | None = None
    heard: Part | None = None
    cut: dict[int, float] = field(default_factory=dict)

    def part_of(self, process: Process) -> Part | None:
        return next((part for part in (self.decode, self.prefill) if part is not None and part.process == process), None)


class Dispatcher:
    """All requests behind one gateway. expects: whether a worker of a model is being started, so that it is worth waiting for. metrics: is
    told of them."""

    def __init__(
        self, fleet: Fleet, clock: Clock, expects: Callable[[str], bool], metrics: PDMetrics, policy: CoursePolicy | None = None
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._expects = expects
        self._metrics = metrics
        self._policy = policy or CoursePolicy()
        self._members: dict[str, Member] = {}
        self._lives: dict[str, _Live] = {}
        self._ledger = Ledger(fleet, clock)

    # Workers

    @property
    def members(self) -> Iterable[Member]:
        return self._members.values()

    def member(self, name: str) -> Member | None:
        return self._members.get(name)

    def answering(self, model: str) -> list[EngineInfo]:
        """Of the workers that may get whole requests."""
        return [self._members[worker.id].info for worker in self._fleet.registry.takers(model, Role.MIXED)]

    def is_moving(self, name: str) -> bool:
        """Whether a worker is there, and shows it."""
        return self._fleet.state(name) in (State.HEALTHY, State.SUSPECT)

    def join(self, name: str, role: Role, info: EngineInfo, client: EngineClient) -> None:
        """A worker is ready: it gets requests from now on, until its stream ends."""
        self._fleet.join(Worker.of(name, role, info))
        member = self._members[name] = Member(Process(name, info.boot), info, client)
        client.attach(_Ear(self, member))
        self._retry()

    def leave(self, member: Member) -> None:
        """A worker's stream has ended."""
        name, boot = process = member.process
        self._fleet.health.ended(name, boot)
        self._fleet.leave(name, boot)
        self._ledger.leave(process)
        if self._members.get(name) is member:
            del self._members[name]
        for live in list(self._lives.values()):
            self._cut(live, process)
            self._carry_out(live, live.course.lost(process))

    def heard(self, member: Member, message: FromWorker) -> None:
        """A worker says something."""
        name, boot = process = member.process
        match message:
            case StepOutput():
                self._fleet.health.stepped(name, boot)
                for output in message.outputs:
                    if (live := self._lives.get(output.request_id)) is not None:
                        self._output(live, member, output)
            case Stats():
                member.stats = message
                self._fleet.health.counted(name, boot, message.steps, idle=message.idle)
            case Cached(chains, evicted):
                self._fleet.prefixes.remove(name, evicted)
                for chain in chains:
                    self._fleet.prefixes.add(name, chain)
            case Leaving():
                log.info("worker %s is leaving", name)
                self._fleet.health.heard(name, boot)
                self._fleet.registry.drain(name)
                member.client.drain()
            case Failed() | Reserved() | Ready() | Taken() | Refused():
                self._fleet.health.heard(name, boot)
                request_id = message.ticket.request_id if isinstance(message, Ready) else message.request_id
                if (live := self._lives.get(request_id)) is not None:
                    self._note(live, process, message)
                    self._carry_out(live, live.course.heard(process, message))

    def role_of(self, name: str) -> Role:
        worker = self._fleet.registry.get(name)
        assert worker is not None, f"{name} is a member"
        return worker.role

    def state_of(self, name: str) -> str:
        """Draining, or how healthy it is."""
        return "draining" if self._fleet.registry.is_draining(name) else self._fleet.state(name).value

    def migrate(self, name: str) -> int:
        """Have others go on with what a worker decodes, from its frames. Returns how many requests have left it: not those that nobody
        else could take."""
        member, left = self._members[name], 0
        for live in list(self._lives.values()):
            if live.decode is not None and live.decode.process == member.process and self._has_elsewhere(live, Role.MIXED, name):
                self._carry_out(live, live.course.leave(member.process, gives=member.info.address != ""))
                left += 1
        return left

    async def drain(self, name: str) -> None:
        """Have a worker get nothing new and its streams go elsewhere; returns when it has nothing any more."""
        self._fleet.registry.drain(name)
        self.migrate(name)
        while (load := self._fleet.loads.by_worker.get(name)) is not None and load.parts:
            await asyncio.sleep(0.02)

    async def watch(self) -> None:
        """Look after the workers, for ever."""
        while True:
            await asyncio.sleep(self._fleet.health.policy.tick)
            self.tick()

    def tick(self) -> None:
        for change in self._fleet.tick():
            if change.after is not State.GONE:
                log.warning("worker %s is %s: %s", change.worker_id, change.after, change.reason or "it moves")
            if change.after is State.UNHEALTHY and (member := self._members.get(change.worker_id)) is not None:
                self._move_away(member.process)
        for name in self._fleet.health.to_ask():
            self._members[name].client.ask()
        self._retry()

    # Requests

    async def generate(self, model: str, requests: Sequence[Generate], session: str | None = None) -> AsyncGenerator[SequenceOutput, None]:
        """Have requests answered by a model's workers and yield their outputs as they come, until every choice has had its last.
        session: as in `RouteRequest`.

        Raises the error of the first request that is refused, `ModelBroken`, `Unavailable` when no worker can take one, and `EngineDied`
        when it has lost too many. Whatever is unfinished when the generator ends, is closed or is cancelled is aborted at once. Wrap it
        in `contextlib.aclosing`, as a generator that is merely dropped is closed only later.
        """
        feed = Feed(requests)
        try:
            for request in requests:
                self._begin(model, request, session, feed)
            while (output := await feed.next()) is not None:
                if output.finish_reason is FinishReason.BROKEN:
                    raise ModelBroken.at_next_token()
                yield output
        finally:
            for request in requests:
                live = self._lives.get(request.request_id)
                if live is not None:
                    self._carry_out(live, live.course.abort())
                    del self._lives[request.request_id]

    def abort(self, request_id: str, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Stop a request, or one of its choices, at once. Nothing more is yielded for it. Unknown ids are let pass:
        its last output may be under way."""
        live = self._lives.get(request_id)
        if live is not None:
            live.feed.close(request_id, choice)
            self._carry_out(live, live.course.abort(choice, reason))

    def fail_all(self, why: TokenmillError) -> None:
        """End all requests with this error."""
        for live in list(self._lives.values()):
            live.feed.put(why)

    def can_serve(self, model: str) -> bool:
        """Whether a whole request would find a worker now."""
        return any(self.is_moving(worker.id) for worker in self._fleet.registry.takers(model, Role.MIXED))

    def _begin(self, model: str, request: Generate, session: str | None, feed: Feed) -> None:
        assert request.request_id not in self._lives, f"request id {request.request_id} is in use"
        workers = [worker for worker in self._fleet.registry if worker.model == model]
        hashes = block_hashes(request.prompt, request.cache_salt, workers[0].fingerprint) if len(workers) > 1 else []
        assert request.params.max_tokens is not None, "max_tokens is resolved by the sender"
        route = RouteRequest(
            model=model, prompt_tokens=len(request.prompt), max_tokens=request.params.max_tokens, hashes=hashes, session=session
        )
        course = Course(request, separate=self._is_worth_separating(request, route), policy=self._policy)
        live = self._lives[request.request_id] = _Live(request, route, course, feed, self._metrics.request(self._clock.now()))
        self._carry_out(live, course.begin())

    def _is_worth_separating(self, request: Generate, route: RouteRequest) -> bool:
        """As far as can be said before a worker has looked how much of the prompt it has."""
        if not self._fleet.registry.takers(route.model, Role.PREFILL):
            return False
        # Where a budget's points lie is known to the engines alone.
        first_point = None if request.params.kv_budget_mb is None else 0
        if must_stay_whole(request.params, len(request.prompt), first_point) is not None:
            return False
        decode = self._fleet.router.choose(route, Role.DECODE).worker
        if decode is None:
            return False
        return self._prefill_worker(route, frozenset({decode.id}), decode.id, None) is not None

    def _prefill_worker(self, route: RouteRequest, excluded: frozenset[str], decode_id: str, have: int | None) -> Worker | None:
        """A worker for the prompt alone, if that is worth it. have: positions of it that the decode worker has, if it has said so."""
        fleet, decode = self._fleet, self._members[decode_id].info
        peers = msgspec.structs.replace(route, fingerprint=decode.fingerprint)
        worker = fleet.router.choose(peers, Role.PREFILL, excluded=excluded, peer=decode_id).worker
        if worker is None:
            return None
        return worker if fleet.decide(route, worker.id, decode_id, decode.kv_bytes_per_token, have).separate else None

    def _worker(self, process: Process | None) -> Worker | None:
        """If it is still there."""
        worker = None if process is None else self._fleet.registry.get(process.name)
        return worker if worker is not None and Process(worker.id, worker.boot) == process else None

    def _carry_out(self, live: _Live, effects: Iterable[Effect]) -> None:
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case Deliver(output):
                    self._deliver(live, output)
                case Send(process, message):
                    self._send(live, process, message)
                case NeedDecode():
                    todo.extend(self._find_decode(live, effect))
                case NeedPrefill():
                    todo.extend(self._find_prefill(live, effect))
                case Fail(error):
                    live.feed.put(error)
        self._settle(live)

    def _send(self, live: _Live, process: Process, message: ToWorker) -> None:
        member = self._members.get(process.name)
        if member is None or member.process != process:
            return
        if isinstance(message, Start) and live.decode is not None:
            self._ledger.start(live.decode)
        elif isinstance(message, Reserve):
            live.reserved_at = self._clock.now()
        member.client.send(message)

    def _find_decode(self, live: _Live, need: NeedDecode) -> list[Effect]:
        self._settle(live)
        wanted = Role.DECODE if need.separate else Role.MIXED
        choice = self._fleet.router.choose(live.route, wanted, excluded=need.excluding)
        if choice.worker is None:
            now = self._clock.now()
            since = now if live.held is None else live.held[0]
            begun = live.course.epoch > live.generate.epoch
            if self._expects(live.route.model) or (begun and now - since < HOLD):
                live.held = (since, need)
                return []
            live.held = None
            return live.course.decode_worker(choice.error(choice.reason))
        live.held = None
        # The rest of an answer is none of another model's, nor is what the client was told of who gives it.
        live.route = msgspec.structs.replace(live.route, fingerprint=choice.worker.fingerprint)
        live.decode = self._ledger.give(live.route, len(live.generate.choices), choice.worker, wanted)
        return live.course.decode_worker(live.decode.process)

    def _find_prefill(self, live: _Live, need: NeedPrefill) -> list[Effect]:
        worker = self._worker(need.source) or self._prefill_worker(live.route, need.excluding, need.decode.name, need.have)
        if worker is None:
            return live.course.prefill_worker(None)
        live.prefill = self._ledger.give(live.route, 1, worker, Role.PREFILL, need.decode)
        return live.course.prefill_worker(live.prefill.process)

    def _settle(self, live: _Live) -> None:
        """Count as ended what the course has no more to do with."""
        if live.decode is not None and live.course.decode != live.decode.process:
            self._ledger.end(live.decode)
            live.decode = None
        if live.prefill is not None and live.course.prefill != live.prefill.process:
            self._ledger.end(live.prefill)
            live.prefill = None

    def _output(self, live: _Live, member: Member, output: SequenceOutput) -> None:
        effects = live.course.heard(member.process, output)
        if not effects:
            return
        part = live.part_of(member.process)
        if part is not None and output.tokens:
            if live.heard is not part:
                live.heard = part
                live.times.first_output(self._clock.now(), output.index, len(output.tokens), part.begun, prefill=part is live.prefill)
            self._ledger.output(part, output)
            if live.cut and (since := live.cut.pop(output.choice, None)) is not None:
                recomputed = len(live.generate.prompt) + output.index - output.reused
                self._metrics.recovered(recomputed, self._clock.now() - since)
        if len(effects) == 1 and not live.course.over:  # nearly always
            assert isinstance(effects[0], Deliver)
            self._deliver(live, output)
        else:
            self._carry_out(live, effects)

    def _deliver(self, live: _Live, output: SequenceOutput) -> None:
        if output.drafted:
            live.times.verified(output.drafted, len(output.tokens) - 1)
        if output.finish_reason is not None:
            live.times.choice_ended(self._clock.now(), output.index + len(output.tokens), output.finish_reason)
        live.feed.put(output)

    def _note(self, live: _Live, process: Process, message: Failed | Reserved | Ready | Taken | Refused) -> None:
        """What is learnt about workers from what one says of a request."""
        part, source = live.part_of(process), live.prefill
        match message:
            case Failed() if part is not None:
                self._ledger.failed(part, message)
            case Reserved():
                self._ledger.reserved(self._clock.now() - live.reserved_at)
            case Ready() if part is not None:
                self._ledger.ready(part, message)
            case Taken() if source is not None:
                self._ledger.taken(source, process, message)
                live.times.copied(message.seconds)
            case Refused() if source is not None:
                self._ledger.refused(source, process, message)

    def _move_away(self, process: Process) -> None:
        """A worker does not move: its requests go elsewhere, where there is an elsewhere. Where there is none they wait with it."""
        for live in list(self._lives.values()):
            part = live.part_of(process)
            if part is None:
                continue
            if part is live.prefill or self._has_elsewhere(live, Role.MIXED, process.name):
                self._cut(live, process)
                self._carry_out(live, live.course.hung(process))

    def _cut(self, live: _Live, process: Process) -> None:
        """A worker is about to be lost."""
        if live.decode is not None and live.decode.process == process:
            now = self._clock.now()
            live.cut = {choice: live.cut.get(choice, now) for choice in live.course.begun}

    def _has_elsewhere(self, live: _Live, wanted: Role, name: str) -> bool:
        return self._fleet.router.choose(live.route, wanted, excluded=(name,)).worker is not None

    def _retry(self) -> None:
        """Look again for those who wait for a worker."""
        for live in list(self._lives.values()):
            if live.held is not None:
                self._carry_out(live, self._find_decode(live, live.held[1]))


class _Ear:
    """Hears one worker for the dispatcher."""

    def __init__(self, dispatcher: Dispatcher, member: Member) -> None:
        self._dispatcher = dispatcher
        self._member = member

    def heard(self, message: FromWorker) -> None:
        self._dispatcher.heard(self._member, message)

    def ended(self) -> None:
        self._dispatcher.leave(self._member)
