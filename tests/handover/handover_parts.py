"""The parts of a world (handover_world.py): what each process, stream and client is at one moment, to be copied before it is changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import msgspec

from tokenmill.cluster.course import Course, CoursePolicy, NeedDecode, NeedPrefill, Process
from tokenmill.core.handover import Prefill, Ticket, token_hash
from tokenmill.core.messages import Generate
from tokenmill.core.types import FRAME
from tokenmill.worker.handover.lease import Leases, Source
from tokenmill.worker.handover.reservation import Reservations, Target

FAULTS = frozenset(
    {
        "death",  # a worker's process ends and another starts at its address
        "loss",  # it ends for good
        "gateway",  # the gateway's process ends and another starts; clients send their requests again
        "read",  # a read fails
        "garbage",  # a read brings the bytes of something else
        "stuck",  # a read does not end before it is told to
        "cancel",  # the client goes away
        "stop",  # the client has seen enough of one choice
        "tick",  # a deadline is over on some worker
        "refusal",  # a worker does not take what it is asked to
        "failure",  # an engine gives up what it has begun
        "suspicion",  # a worker is taken for one that hangs
        "replay",  # a message comes a second time, at any later moment
    }
)


@dataclass(frozen=True)
class Request:
    """prompt: its tokens are this, repeated, so that equal ones are shared. length: of the prompt."""

    id: str
    prompt: int
    length: int = 17
    max_tokens: int = 2
    choices: int = 1
    separate: bool = True


POLICY = CoursePolicy(reservation_expiry=10.0, lease_expiry=10.0)


@dataclass(frozen=True)
class Scenario:
    """faults: how many a run may have, of which kinds."""

    requests: tuple[Request, ...]
    prefill: int = 2
    decode: int = 2
    prefill_frames: int = 2
    decode_frames: int = 4
    faults: int = 0
    kinds: frozenset[str] = FAULTS
    policy: CoursePolicy = POLICY

    def faulty(self, faults: int, *kinds: str) -> Scenario:
        return replace(self, faults=faults, kinds=frozenset(kinds) or FAULTS - {"gateway", "replay"})


_encoder = msgspec.msgpack.Encoder(enc_hook=str)


def _sorted(value: Any) -> Any:
    """Sets and dicts in an order that does not depend on how they came about."""
    if isinstance(value, dict):
        return sorted(value.items(), key=lambda item: item[0])
    return sorted(value) if isinstance(value, frozenset) else value


class Wire(NamedTuple):
    """A message and its bytes, which are what tells states apart."""

    message: Any
    data: bytes

    @classmethod
    def of(cls, message: Any) -> Wire:
        return cls(message, type(message).__name__.encode() + _encoder.encode(message))


class Ended(NamedTuple):
    """On a stream: nothing comes after it from this process."""

    boot: str


class Hello(NamedTuple):
    """On a stream: another process speaks from here on."""

    boot: str


class Frame(NamedTuple):
    """content: None: nobody can know. cached: the prefix tree has it, under what it holds."""

    content: bytes | None = None
    cached: bool = False


GARBAGE = b"garbage"


@cache
def content(tokens: tuple[int, ...]) -> bytes:
    """What a frame holds that ends after these tokens."""
    return token_hash(tokens)[:6]


def contents(tokens: Ordered[int]) -> list[bytes]:
    return [content(tuple(tokens[:stop])) for stop in range(FRAME, len(tokens) + 1, FRAME)]


def token(request_id: str, choice: int, index: int) -> int:
    """The one token that an answer has there, whoever computes it."""
    return 1000 + 100 * (ord(request_id[0]) - ord("a")) + 10 * choice + index


class Sequence(msgspec.Struct, frozen=True):
    """What an engine runs. owner: of its frames. index: of the next token."""

    generate: Generate
    choice: int
    owner: bytes
    index: int


class Table(NamedTuple):
    """The frames of an owner, in the order of positions, and the tokens that they are for."""

    tokens: tuple[int, ...]
    numbers: tuple[int, ...]


class Task(msgspec.Struct, frozen=True):
    """A prompt that is being computed for a lease."""

    prefill: Prefill
    computed: int


class Reading(msgspec.Struct, frozen=True):
    ticket: Ticket
    stopped: bool = False
    stuck: bool = False


class Node:
    """A part of the world that an event may change. Only fresh copies are changed."""

    constant: ClassVar[frozenset[str]] = frozenset({"_key"})

    def __init__(self) -> None:
        self._key: bytes | None = None

    @property
    def key(self) -> bytes:
        if self._key is None:
            self._key = blake2b(_encoder.encode(self.state()), digest_size=12).digest()
        return self._key

    def state(self) -> Any:
        raise NotImplementedError

    def branch(self) -> Any:
        fresh = copy.copy(self)
        fresh._key = None
        return fresh


class Stream(Node):
    """What one process has sent another and that has not arrived."""

    def __init__(self, wires: tuple[Wire, ...] = ()) -> None:
        super().__init__()
        self.wires = wires

    def state(self) -> Any:
        return [wire.data for wire in self.wires]


class Client(Node):
    """What clients have been given."""

    def __init__(self, requests: Iterable[Request]) -> None:
        super().__init__()
        self.given: dict[tuple[str, int], tuple[int, ...]] = {(r.id, c): () for r in requests for c in range(r.choices)}
        self.ends: dict[tuple[str, int], str] = {}

    def state(self) -> Any:
        return list(self.given.values()), sorted(self.ends.items())

    def branch(self) -> Client:
        fresh: Client = super().branch()
        fresh.given, fresh.ends = dict(self.given), dict(self.ends)
        return fresh


class Ghost(Node):
    """What nobody in the world knows, to judge by.

    faults: how many there have been. attempts: the newest epoch of each request. released: boots that were told to let that one go.
    unlucky: whether something may have been lost that only the clock brings back. sent: what may come again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults = 0
        self.attempts: dict[str, int] = {}
        self.released: frozenset[tuple[str, str]] = frozenset()
        self.unlucky = False
        self.sent: tuple[tuple[str, Wire], ...] = ()

    def state(self) -> Any:
        sent = sorted((stream, wire.data) for stream, wire in self.sent)
        return self.faults, _sorted(self.attempts), _sorted(self.released), self.unlucky, sent

    def branch(self) -> Ghost:
        fresh: Ghost = super().branch()
        fresh.attempts = dict(self.attempts)
        return fresh


class Gateway(Node):
    """Courses, the router, and whom it has a stream to."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.start = start
        self.courses: dict[str, Course] = {}
        self.needs: tuple[tuple[str, NeedDecode | NeedPrefill], ...] = ()
        self.known: dict[str, Process] = {}

    def state(self) -> Any:
        courses = [[_sorted(value) for name, value in vars(course).items() if name not in _FIXED] for course in self.courses.values()]
        needs = [(request_id, type(need).__name__, sorted(need.excluding)) for request_id, need in self.needs]
        return self.start, courses, needs, _sorted(self.known)

    def branch(self) -> Gateway:
        fresh: Gateway = super().branch()
        fresh.courses, fresh.known = dict(self.courses), dict(self.known)
        return fresh

    def course(self, request_id: str) -> Course:
        course = copy.copy(self.courses[request_id])
        course._open = {choice: list(tokens) for choice, tokens in course._open.items()}
        self.courses[request_id] = course
        return course


_FIXED = frozenset({"_generate", "_policy", "_separate"})


class Worker(Node):
    """A process: both machines, the engine's frames and sequences, the connector's reads, and its own clock.

    tables: by owner: the nonce of a lease or reservation, which a sequence that it lets run keeps, or a whole request's own name.
    waiting: what each reservation was made for. copied: up to which position the frames of each lease have been read.
    """

    def __init__(self, name: str, n_frames: int, start: int = 0, link: int = 0) -> None:
        super().__init__()
        self.name, self.start, self.link = name, start, link
        self.alive = True
        self.now = 0.0
        self.nonces = 0
        self.leases = Leases(Source(self.process.boot, "model", name))
        self.reservations = Reservations(Target(self.process.boot, "model", (None,)))
        self.frames = (Frame(),) * n_frames
        self.tables: dict[bytes, Table] = {}
        self.tasks: dict[bytes, Task] = {}
        self.waiting: dict[bytes, Generate] = {}
        self.copied: dict[bytes, int] = {}
        self.reads: dict[bytes, Reading] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}

    @property
    def process(self) -> Process:
        return Process(self.name, f"{self.name}.{self.start}")

    def state(self) -> Any:
        if not self.alive:
            return self.start
        machines = self.leases._leases, self.reservations._reservations
        holdings = [_sorted(held) for held in (*machines, self.tables, self.tasks, self.waiting, self.copied, self.reads, self.sequences)]
        return self.start, self.link, self.now, self.nonces, self.frames, holdings

    def branch(self) -> Worker:
        fresh: Worker = super().branch()
        fresh.leases, fresh.reservations = copy.copy(self.leases), copy.copy(self.reservations)
        fresh.leases._leases, fresh.reservations._reservations = dict(self.leases._leases), dict(self.reservations._reservations)
        fresh.tables, fresh.tasks, fresh.waiting = dict(self.tables), dict(self.tasks), dict(self.waiting)
        fresh.copied, fresh.reads, fresh.sequences = dict(self.copied), dict(self.reads), dict(self.sequences)
        return fresh

    @property
    def idle(self) -> bool:
        """Whether it holds nothing for anybody."""
        return not (self.leases or self.reservations or self.tables or self.tasks or self.waiting or self.reads or self.sequences)

    def deadlines(self) -> list[float]:
        return [when for when in (self.leases.deadline(), self.reservations.deadline()) if when is not None]

    def put(self, number: int, frame: Frame) -> None:
        self.frames = (*self.frames[:number], frame, *self.frames[number + 1 :])

    def acquire(self, owner: bytes, tokens: list[int]) -> int | None:
        """Frames for all full frames of tokens; returns for how many positions the prefix tree had them, or None if there are too few."""
        assert owner not in self.tables, "an owner's frames are taken once"
        held = {number for table in self.tables.values() for number in table.numbers}
        free = sorted((number for number in range(len(self.frames)) if number not in held), key=lambda n: self.frames[n].cached)
        cached = {self.frames[number].content: number for number in free if self.frames[number].cached}
        wanted = contents(tokens)
        hits: list[int] = []
        for name in wanted[: (len(tokens) - 1) // FRAME]:
            if name not in cached:
                break
            hits.append(cached[name])
        new = [number for number in free if number not in hits][: len(wanted) - len(hits)]
        if len(hits) + len(new) < len(wanted):
            return None
        self.tables[owner] = Table(tuple(tokens), (*hits, *new))
        for number in hits:
            self.put(number, Frame(self.frames[number].content))
        for number in new:
            self.put(number, Frame())
        return FRAME * len(hits)

    def fill(self, owner: bytes, start: int, stop: int) -> None:
        """Compute the positions [start, stop)."""
        names = contents(self.tables[owner].tokens)
        for position in range(start // FRAME, stop // FRAME):
            self.put(self.tables[owner].numbers[position], Frame(names[position]))

    def write(self, owner: bytes, ticket: Ticket, names: list[bytes | None]) -> None:
        """What a connector does to the frames that it reads into."""
        for position, name in enumerate(names, ticket.start // FRAME):
            self.put(self.tables[owner].numbers[position], Frame(name))

    def check(self, owner: bytes, stop: int) -> None:
        """The full frames of the positions [0, stop) must hold what they should."""
        table = self.tables[owner]
        held = [self.frames[number].content for number in table.numbers[: stop // FRAME]]
        right = contents(table.tokens[:stop])
        assert held == right, f"{self.name}: frames hold {held}, but should hold {right}"

    def free(self, owner: bytes, right: int) -> None:
        """An owner gives up its frames; those of `right` positions enter the prefix tree."""
        self.check(owner, right)
        cached = {frame.content for frame in self.frames if frame.cached}
        for position, number in enumerate(self.tables.pop(owner).numbers):
            name = self.frames[number].content
            self.put(number, Frame(name, position < right // FRAME and name not in cached))
