"""Prompts that are brought to a worker while it steps: when reads begin and end, and whose frames they write to."""

from __future__ import annotations

import gc
import itertools
import queue
import random
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from handover_samples import PROMPT, RELEASE, TARGET, generate, reserve, start, ticket

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.handover import (
    FromWorker,
    Ready,
    Refused,
    Release,
    Reserve,
    Reserved,
    Start,
    Taken,
    ToWorker,
    frames_of_chunk,
    full_positions,
    token_hash,
)
from tokenmill.core.messages import Abort, Drain, Failed, Generate, SequenceOutput, StepOutput
from tokenmill.core.types import FRAME, SamplingParams
from tokenmill.engine.filling import Filling
from tokenmill.engine.transit import Gate, Transit
from tokenmill.kv.groups import KVGroup, Whole, Window
from tokenmill.kv.manager import KVManager
from tokenmill.transfer.connector import Status
from tokenmill.worker import wire
from tokenmill.worker.exchange import Exchange
from tokenmill.worker.main import Inbox, Worker

PATIENCE = 60.0
MESSAGES = msgspec.msgpack.Decoder(FromWorker)
STREAM = Generate(request_id="stream", prompt=[1], params=SamplingParams())


class Once:
    """What only one thread at a time may do."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        assert self._lock.acquire(blocking=False), "two threads use the engine at a time"

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class WatchedTransit(Transit):
    """released: keys, as they go."""

    def __init__(self, kv: KVManager, chunk: int, once: Once) -> None:
        super().__init__(kv, chunk)
        self._once = once
        self.released: queue.SimpleQueue[object] = queue.SimpleQueue()

    def place(self, key: Any, stop: int) -> Any:
        with self._once:
            return super().place(key, stop)

    def land(self, key: Any, stop: int) -> None:
        with self._once:
            super().land(key, stop)

    def release(self, key: Any) -> None:
        with self._once:
            super().release(key)
        self.released.put(key)


class Stepper:
    """An engine of real frames and no model. Once it has a request it is always in a step, until `in_work` is false again."""

    def __init__(self, frames: int) -> None:
        groups = [KVGroup("whole", Whole(), ((0, 0),)), KVGroup("window", Window(TARGET.windows[1] or 0), ((1, 0),))]
        self.once = Once()
        self.kv = KVManager(groups, frames, BlockManagerConfig(block_size=8))
        self.transit = WatchedTransit(self.kv, 32, self.once)
        self.info: Any = msgspec.defstruct("Info", ["fingerprint"])("model")
        self.windows = TARGET.windows
        self.filling = Filling(self.kv, "model", store=False, router=True)
        self.memory = self
        self.added: queue.SimpleQueue[Generate] = queue.SimpleQueue()
        self.in_work = False
        self.in_step = False

    def frames(self, numbers: Sequence[Sequence[int]]) -> Any:
        return msgspec.defstruct("Bytes", ["nbytes"])(sum(map(len, numbers)))

    @property
    def has_work(self) -> bool:
        return self.in_work

    def reserve(self, key: object, request: Generate) -> int | None:
        with self.once:
            return self.transit.reserve(key, request.prompt, request.cache_salt, spare=0)

    def add(self, request: Generate) -> None:
        with self.once:
            self.in_work = True
            if request.request_id != "stream":
                self.added.put(request)

    def abort(self, request_id: str, choice: int | None, reason: object) -> None:
        with self.once:
            self.in_work = self.in_work and request_id != "stream"

    def abort_all(self) -> None:
        self.abort("stream", None, None)

    def execute(self) -> None:
        """Outside of every turn."""

    def finish_step(self) -> list[SequenceOutput]:
        with self.once:
            self.in_step = False
            return []

    def take_leases(self) -> list[Any]:
        return []

    def give_way(self) -> None:
        pass

    def start_step(self) -> None:
        with self.once:
            self.in_step = self.in_work

    def close(self) -> None:
        pass


class PlayedSteps(Stepper):
    """Steps last as long as a test says. displace: the next one takes a reservation's frames."""

    displace = False

    def __init__(self) -> None:
        super().__init__(64)
        self._begun, self._may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.n_finished = 0

    def execute(self) -> None:
        self._begun.release()
        assert self._may_end.acquire(timeout=PATIENCE)

    def finish_step(self) -> list[SequenceOutput]:
        self.n_finished += 1
        return super().finish_step()

    def start_step(self) -> None:
        if self.displace:
            self.displace = False
            with self.once:
                assert self.transit.give_way(True)
        super().start_step()

    def wait_for_step(self) -> None:
        """Until the next one is executed."""
        assert self._begun.acquire(timeout=PATIENCE)

    def end_step(self) -> None:
        self._may_end.release()


@dataclass(eq=False)
class Reading:
    """A read under way."""

    mine: Sequence[Sequence[int]]
    interrupted: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


class PlayedReader:
    """Reads go on until a test ends them, whatever interrupts them."""

    def __init__(self) -> None:
        self._begun: queue.SimpleQueue[Reading] = queue.SimpleQueue()

    def read(self, address: str, boot: str, nonce: bytes, theirs: Any, mine: Any, checksum: bytes, guard: Gate) -> Status:
        reading = Reading(mine)
        with guard:
            guard.interrupt = reading.interrupted.set
            if not guard.open:
                return Status("refused", "nonce")
            self._begun.put(reading)
            assert reading.over.wait(PATIENCE)
        return Status("lost", "ended") if reading.interrupted.is_set() else Status()

    def next(self) -> Reading:
        return self._begun.get(timeout=PATIENCE)

    @property
    def has_begun(self) -> bool:
        return not self._begun.empty()

    def close(self) -> None:
        pass


class Desk:
    """A worker in a thread, and its gateway's end of the stream. failure: what has ended the worker's loop."""

    def __init__(self, engine: Any, reader: Any) -> None:
        ours, self._theirs = socket.socketpair()
        self._theirs.settimeout(PATIENCE)
        self.failure: BaseException | None = None
        door: Any = msgspec.defstruct("Door", ["address"])("shm:@d")
        self._ours, self._inbox = ours, Inbox(ours)

        def send(message: FromWorker) -> None:
            with engine.once:
                wire.send(ours, message)

        self.exchange = Exchange(engine, TARGET.boot, door, reader, send, self._inbox.post)
        self._worker = Worker(engine, send, self._inbox, self.exchange)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def is_heard(self) -> bool:
        """Whether somebody still reads what it is told."""
        return self._inbox._thread.is_alive()

    def say(self, *messages: ToWorker) -> None:
        for message in messages:
            wire.send(self._theirs, message)

    def hear(self) -> FromWorker:
        """What it says next, but for the ends of steps."""
        while True:
            body = wire.receive(self._theirs)
            assert body is not None, "the worker has ended"
            message = MESSAGES.decode(body)
            if not isinstance(message, StepOutput):
                return message

    def reserve(self, expiry: float = 10.0) -> bytes:
        """The nonce of a reservation."""
        self.say(reserve(expiry=expiry))
        reserved = self.hear()
        assert isinstance(reserved, Reserved)
        return reserved.nonce

    def end(self) -> None:
        """The stream's end, from the gateway's side, has been seen."""
        self._theirs.shutdown(socket.SHUT_WR)
        self._inbox.join(PATIENCE)

    def close(self) -> None:
        self.end()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self._theirs.close()
        self._ours.close()

    def _run(self) -> None:
        try:
            self._worker.run()
            self._worker.abandon()
        except BaseException as error:
            self.failure = error


class Play:
    """A worker that decodes a stream, with a reservation."""

    def __init__(self) -> None:
        self.engine, self.reader = PlayedSteps(), PlayedReader()
        self.desk = Desk(self.engine, self.reader)
        self.nonce = self.desk.reserve()
        self.desk.say(STREAM)
        self.engine.wait_for_step()

    def ready(self, number: int) -> Ready:
        return Ready(ticket(number, self.nonce))

    def begin(self, number: int) -> Reading:
        """A ticket arrives, and is read."""
        self.desk.say(self.ready(number))
        return self.reader.next()

    def step(self) -> None:
        """To the next step."""
        self.engine.end_step()
        self.engine.wait_for_step()

    def end(self) -> None:
        self.engine.in_work = False
        self.engine.end_step()
        self.desk.close()
        if self.desk.failure is not None:
            raise self.desk.failure
        assert self.engine.kv.n_held == 0
        self.engine.kv.check_integrity()


@pytest.fixture
def play() -> Iterator[Play]:
    play = Play()
    yield play
    play.end()


def test_chunks_are_read_one_after_another_and_told_while_a_step_is_executed(play: Play) -> None:
    for number in (0, 1):
        play.begin(number).over.set()
        taken = play.desk.hear()
        assert isinstance(taken, Taken)
        assert taken.chunk == number
    play.desk.say(start(7))
    added = play.engine.added.get(timeout=PATIENCE)
    assert (added.output, play.engine.kv.match(PROMPT, "tenant").frames) == ({0: [7]}, 2)
    assert play.engine.n_finished == 0
    assert play.desk.exchange.stats().reads == 2


def test_a_chunk_whose_ticket_has_waited_is_read_when_the_one_before_it_is_there(play: Play) -> None:
    first = play.begin(0)
    play.desk.say(play.ready(1), start(7))
    first.over.set()
    play.reader.next().over.set()
    assert play.engine.added.get(timeout=PATIENCE).output == {0: [7]}
    assert play.engine.n_finished == 0


def test_a_worker_that_waits_for_frames_alone_goes_on_when_they_have_come() -> None:
    engine, reader = PlayedSteps(), PlayedReader()
    desk = Desk(engine, reader)
    nonce = desk.reserve(expiry=10 * PATIENCE)
    desk.say(Ready(ticket(0, nonce)), start(7))
    reader.next().over.set()
    assert isinstance(desk.hear(), Taken)
    engine.wait_for_step()
    engine.in_work = False
    engine.end_step()
    desk.close()
    assert desk.failure is None


def test_a_worker_that_has_ended_is_no_more_held_by_who_reads_its_stream() -> None:
    desk = Desk(Stepper(64), PlayedReader())
    desk.say(Drain())
    desk.thread.join(PATIENCE)
    assert desk.is_heard
    worker = weakref.ref(desk.__dict__.pop("_worker"))
    gc.collect()
    assert worker() is None
    desk.close()


def test_what_is_released_while_it_is_read_keeps_its_frames_until_the_read_has_ended(play: Play) -> None:
    reading = play.begin(0)
    play.desk.say(RELEASE)
    assert not reading.interrupted.wait(0.01), "aborts and releases wait for the end of the step"
    play.step()
    assert reading.interrupted.wait(PATIENCE), "nobody waits for the reader, but it is told"
    assert play.engine.kv.n_held == 2
    assert play.engine.transit.released.empty()
    reading.over.set()
    assert play.engine.transit.released.get(timeout=PATIENCE) == play.nonce
    assert play.engine.n_finished == 1, "its end is no more waited for"


def test_a_ticket_that_overtakes_a_release_is_read_into_frames_that_are_still_the_reservations(play: Play) -> None:
    play.desk.say(RELEASE)
    reading = play.begin(0)
    play.step()
    assert reading.interrupted.wait(PATIENCE)
    assert play.engine.kv.n_held == 2
    reading.over.set()
    assert play.engine.transit.released.get(timeout=PATIENCE) == play.nonce


def test_a_ticket_that_comes_after_a_release_is_not_read(play: Play) -> None:
    play.desk.say(RELEASE)
    while play.engine.transit.released.empty():
        play.step()
    play.desk.say(play.ready(0), start(7))
    assert isinstance(play.desk.hear(), Failed), "of the start"
    assert not play.reader.has_begun
    assert play.desk.exchange.stats().refusals == {"nonce": 1}


def test_a_reservation_that_gives_way_while_it_is_read_does_so_when_the_read_has_ended(play: Play) -> None:
    reading = play.begin(0)
    play.desk.say(play.ready(1), start(7))
    play.engine.displace = True
    play.engine.end_step()
    assert reading.interrupted.wait(PATIENCE)
    assert play.engine.transit.released.empty()
    reading.over.set()
    play.engine.wait_for_step()
    assert play.desk.hear() == Refused("r", 1, play.nonce, "displaced")
    assert play.engine.added.get(timeout=PATIENCE).output == {0: [7]}
    assert play.engine.kv.match(PROMPT, "tenant").frames == 0
    assert not play.reader.has_begun


def test_a_ticket_for_a_reservation_that_has_given_way_is_not_read(play: Play) -> None:
    play.engine.displace = True
    play.step()
    play.desk.say(play.ready(0))
    assert play.desk.hear() == Refused("r", 1, play.nonce, "displaced")
    assert not play.reader.has_begun
    play.desk.say(RELEASE)


def test_the_end_of_the_stream_during_a_step_waits_for_the_read(play: Play) -> None:
    reading = play.begin(0)
    play.desk.end()
    play.engine.end_step()
    assert reading.interrupted.wait(PATIENCE)
    assert play.engine.transit.released.empty()
    reading.over.set()
    play.engine.end_step()
    assert play.engine.transit.released.get(timeout=PATIENCE) == play.nonce


def test_a_fault_in_the_thread_that_has_read_is_the_loops_too() -> None:
    play = Play()
    landing = threading.Event()

    def land(key: object, stop: int) -> None:
        landing.set()
        raise RuntimeError("a fault")

    play.engine.transit.land = land  # type: ignore[method-assign]
    play.begin(0).over.set()
    assert landing.wait(PATIENCE)
    play.engine.end_step()
    with pytest.raises(RuntimeError, match="a fault"):
        play.end()


Content = tuple[int, str, tuple[int, ...]]
"""What a frame holds: its group, the tenant, and all tokens up to its end."""


def content_of(group: int, salt: str, tokens: Sequence[int], first: int, stop: int) -> list[Content]:
    return [(group, salt, tuple(tokens[: end + FRAME])) for end in range(first, stop, FRAME)]


class BusySteps(Stepper):
    """Steps write to frames of their own while they are executed, and see at the end whether anybody else has. content: by frame."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(56)
        self.content: dict[int, object] = {}
        self.displaced = self.found = 0
        self._rng = rng
        self._own: list[int] = []
        self._numbers = itertools.count()

    def execute(self) -> None:
        for frame in self._own:
            self.content[frame] = "a step's"
        threading.Event().wait(self._rng.uniform(0, 0.002))
        assert all(self.content[frame] == "a step's" for frame in self._own), "somebody has written to frames of the step in flight"

    def finish_step(self) -> list[SequenceOutput]:
        self._stop()
        return super().finish_step()

    def start_step(self) -> None:
        with self.once:
            if self.in_work:
                key, tokens = f"run {next(self._numbers)}", FRAME * self._rng.randint(1, 12)
                self.kv.acquire(key, [], "")
                while not self.kv.reserve(key, tokens):
                    assert self.transit.give_way(True)
                    self.displaced += 1
                self._own = [frame for table in self.kv.tables(key) for frame in table.frames(0, tokens // FRAME)]
                self._key = key
        super().start_step()

    def add(self, request: Generate) -> None:
        if request.request_id != "stream":
            with self.once:
                self.found += self.check(request) > 0
        super().add(request)

    def check(self, request: Generate) -> int:
        """What is found of a prompt is right; returns how many positions are."""
        found = self.kv.acquire("check", request.prompt, request.cache_salt)
        for group, table in enumerate(self.kv.tables("check")):
            expected = content_of(group, request.cache_salt, request.prompt, 0, found)
            for frame, right in zip(table.frames(0, found // FRAME), expected, strict=True):
                assert frame < 0 or self.content[frame] == right, "a prompt's frames hold something else"
        self.kv.release("check")
        return found

    def _stop(self) -> None:
        if self._own:
            self.kv.release(self._key)
            self._own = []


class BusyReader:
    """Reads that take their time, some of which fail, and which go on writing when they are interrupted. sent: contents, by checksum.
    spoilt: reads into whose frames somebody else has written meanwhile."""

    def __init__(self, engine: BusySteps, rng: random.Random) -> None:
        self._engine = engine
        self._rng = rng
        self.sent: dict[bytes, list[list[Content]]] = {}
        self.reads = self.spoilt = 0

    def read(self, address: str, boot: str, nonce: bytes, theirs: Any, mine: Any, checksum: bytes, guard: Gate) -> Status:
        content, fails = self.sent[checksum], self._rng.random() < 0.1
        with guard:
            if not guard.open:
                return Status("refused", "nonce")
            self.reads += 1
            for frames, right in zip(mine, content, strict=True):
                for frame, one in zip(frames, right, strict=True):
                    self._engine.content[frame] = "garbage" if fails else one
                    threading.Event().wait(self._rng.uniform(0, 0.0005))
            if not fails:
                self.spoilt += [[self._engine.content[frame] for frame in frames] for frames in mine] != content
        return Status("corrupt", "checksum") if fails else Status()

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Attempt:
    """One request on its way. stops: of its chunks that are still to be told."""

    request: Generate
    nonce: bytes = b""
    chunk: int = 0
    at: int = 0
    stops: list[int] = field(default_factory=list)
    over: bool = False

    def ready(self, reader: BusyReader) -> Ready:
        """The ticket for its next chunk."""
        tokens, stop = self.request.prompt, self.stops.pop(0)
        counts = [frames_of_chunk(self.at, stop, window) for window in TARGET.windows]
        numbers = itertools.count()
        checksum = b"%s %d" % (self.nonce, self.chunk)
        reader.sent[checksum] = [
            content_of(group, self.request.cache_salt, tokens, stop - FRAME * count, stop) for group, count in enumerate(counts)
        ]
        made = msgspec.structs.replace(
            ticket(0, self.nonce),
            request_id=self.request.request_id,
            tenant=self.request.cache_salt,
            token_hash=token_hash(tokens[:stop]),
            chunk=self.chunk,
            start=self.at,
            stop=stop,
            frames=tuple(tuple(itertools.islice(numbers, count)) for count in counts),
            checksum=checksum,
            last=stop == full_positions(len(tokens)),
        )
        self.chunk, self.at = self.chunk + 1, stop
        return Ready(made)


class Traffic:
    """A gateway that asks, starts and releases at random."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.engine = BusySteps(random.Random(seed + 1))
        self.reader = BusyReader(self.engine, random.Random(seed + 2))
        self.desk = Desk(self.engine, self.reader)
        self.attempts: dict[str, Attempt] = {}
        self.desk.say(STREAM)

    def ask(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(3) for _ in range(8)] * 2 + [rng.randrange(2) for _ in range(rng.randint(8, 90))]
        name = f"r{len(self.attempts)}"
        request = msgspec.structs.replace(generate(prompt=prompt), request_id=name, cache_salt=rng.choice("ab"))
        self.attempts[name] = Attempt(request)
        self.desk.say(Reserve(request, PATIENCE))

    def hear(self, wanted: Callable[[], bool]) -> None:
        """Until it is so."""
        while not wanted():
            message = self.desk.hear()
            attempt = self.attempts[message.request_id]  # type: ignore[union-attr]
            match message:
                case Reserved():
                    attempt.nonce, attempt.at = message.nonce, message.have
                    limit = full_positions(len(attempt.request.prompt))
                    inside = range(message.have + FRAME, limit, FRAME)
                    attempt.stops = sorted(self._rng.sample(inside, self._rng.randint(0, min(4, len(inside)))))
                    if limit > message.have:
                        attempt.stops.append(limit)
                case Failed():
                    attempt.over = True

    def go_on(self, attempt: Attempt) -> None:
        """What comes next of it."""
        name, epoch = attempt.request.request_id, attempt.request.epoch
        if self._rng.random() < 0.1:
            self.desk.say(Release(name, epoch))
            attempt.over = True
            if attempt.stops and self._rng.random() < 0.5:
                self.desk.say(attempt.ready(self.reader))
        elif attempt.stops:
            self.desk.say(attempt.ready(self.reader))
        else:
            self.desk.say(Start(name, epoch, (1,)))
            attempt.over = True

    def run(self, count: int) -> None:
        while True:
            live = [attempt for attempt in self.attempts.values() if not attempt.over]
            if len(live) < 4 and len(self.attempts) < count:
                self.ask()
            elif not live:
                return
            else:
                attempt = self._rng.choice(live)
                self.hear(lambda one=attempt: bool(one.nonce) or one.over)  # type: ignore[misc]
                if not attempt.over:
                    self.go_on(attempt)


@pytest.mark.parametrize("seed", range(2))
def test_whoever_comes_and_goes_meanwhile_no_frame_is_written_to_by_others_and_what_is_found_is_right(seed: int) -> None:
    traffic = Traffic(seed)
    traffic.run(count=60)
    while traffic.desk.exchange.busy and traffic.desk.failure is None:
        threading.Event().wait(0.001)
    traffic.desk.say(Abort("stream"))
    traffic.desk.close()
    if traffic.desk.failure is not None:
        raise traffic.desk.failure
    engine = traffic.engine
    assert engine.kv.n_held == 0
    engine.kv.check_integrity()
    for attempt in traffic.attempts.values():
        engine.check(attempt.request)
    assert traffic.reader.spoilt == 0
    print(f"seed {seed}: {traffic.reader.reads} reads, {engine.displaced} gave way, {engine.found} found something")
    assert min(traffic.reader.reads, engine.displaced, engine.found) > 2
