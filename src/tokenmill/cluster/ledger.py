"""What the fleet is told of requests as they go: who has how much to do, who has failed, and how long things take."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from tokenmill.cluster.breaker import Attempt
from tokenmill.cluster.course import Process
from tokenmill.cluster.fleet import Fleet
from tokenmill.cluster.health import Blame, blame
from tokenmill.cluster.load import Key
from tokenmill.cluster.registry import Worker
from tokenmill.cluster.strategies import RouteRequest
from tokenmill.core.clock import Clock
from tokenmill.core.handover import WAITED_TOO_LONG, Ready, Refusal, Refused, Taken
from tokenmill.core.messages import Failed, SequenceOutput
from tokenmill.core.roles import Role

_OF_THE_LINK: frozenset[Refusal] = frozenset({"refused", "lost", "corrupt"})


@dataclass(slots=True, eq=False)
class Part:
    """What a worker does for a request. key: of its load. begun: when it was sent. attempt, link: of the worker's breaker, and of the one
    of the link to who takes the frames, until these know how it went."""

    key: Key
    process: Process
    route: RouteRequest
    begun: float
    attempt: Attempt | None
    link: Attempt | None


class Ledger:
    """Tells a fleet of parts of requests."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._numbers = count()
        self._computed_at: dict[Process, float] = {}  # when it last had computed a prompt

    def give(self, route: RouteRequest, choices: int, worker: Worker, role: Role, target: Process | None = None) -> Part:
        """A worker is about to get a part of a request. target: who takes the frames of a prompt."""
        fleet = self._fleet
        cached = fleet.router.cached_tokens(worker.id, route)
        link = None if target is None else fleet.breakers.begin((worker.id, target.name))
        process = Process(worker.id, worker.boot)
        part = Part(next(self._numbers), process, route, self._clock.now(), fleet.breakers.begin(worker.id), link)
        fleet.loads.give(part.key, worker.id, role, prompt_tokens=route.prompt_tokens, cached_tokens=cached, choices=choices)
        return part

    def start(self, part: Part) -> None:
        """A decode worker need not wait for frames any longer."""
        part.begun = self._clock.now()
        self._fleet.loads.start(part.key)

    def end(self, part: Part) -> None:
        """Nobody waits for it any more."""
        self._fleet.loads.end(part.key)
        for attempt in (part.attempt, part.link):
            if attempt is not None:
                self._fleet.breakers.dropped(attempt)

    def leave(self, process: Process) -> None:
        """A worker is gone."""
        self._computed_at.pop(process, None)

    def output(self, part: Part, output: SequenceOutput) -> None:
        """Tokens of a part are here."""
        if part.attempt is not None:
            self._fleet.breakers.succeeded(part.attempt)
            part.attempt = None
            self._prompt_computed(part, output)
        self._fleet.loads.output(part.key, len(output.tokens))

    def failed(self, part: Part, message: Failed) -> None:
        """A worker does not do a part, which is its fault unless it waited for others or nobody could have done it."""
        if part.attempt is not None and message.status >= 500 and message.code != WAITED_TOO_LONG:
            self._fleet.breakers.failed(part.attempt)
            part.attempt = None

    def reserved(self, seconds: float) -> None:
        """So long took what a hand-over takes beside its bytes."""
        self._fleet.separation.observe_handover(seconds)

    def ready(self, part: Part, message: Ready) -> None:
        """A prefill worker has computed up to there."""
        self._fleet.loads.remaining(part.key, max(0, part.route.prompt_tokens - message.ticket.stop))

    def taken(self, source: Part, target: Process, message: Taken) -> None:
        """Frames were copied."""
        self._fleet.separation.observe_transfer(source.process.name, target.name, message.nbytes, message.seconds)
        if source.link is not None:
            self._fleet.breakers.succeeded(source.link)
            source.link = None

    def refused(self, source: Part, target: Process, message: Refused) -> None:
        """Frames were not copied."""
        if message.reason not in _OF_THE_LINK:
            return
        fleet = self._fleet
        culprit = blame(fleet.state(source.process.name), fleet.state(target.name))
        if culprit is Blame.LINK and source.link is not None:
            fleet.breakers.failed(source.link)
            source.link = None
        elif culprit is Blame.SOURCE and source.attempt is not None:
            fleet.breakers.failed(source.attempt)
            source.attempt = None

    def _prompt_computed(self, part: Part, output: SequenceOutput) -> None:
        now, process = self._clock.now(), part.process
        if output.index == 0:
            # Prompts are computed one after the other, each from when it came or the one before was through.
            computed = part.route.prompt_tokens - output.cached_tokens
            began = max(part.begun, self._computed_at.get(process, part.begun))
            self._fleet.separation.observe_prefill(process.name, computed, now - began)
            self._computed_at[process] = now
        self._fleet.prefixes.add(process.name, part.route.hashes)
