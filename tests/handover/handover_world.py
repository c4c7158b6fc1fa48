"""A gateway, workers, clients and the streams between them, as states that branch with everything that can happen next.

The machines are the real ones. Engine, connector, router and clock are toys: a frame's content is a name for all tokens up to its end,
a checksum is the content itself, and a read copies whatever the other side's frames hold when it ends, whoever lives there by then.
Faults are events too, of which a run has only so many. What must always hold is asserted where it could break; `check_end` has what
must hold when nothing can happen any more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import msgspec
from handover_parts import (
    GARBAGE,
    Client,
    Ended,
    Gateway,
    Ghost,
    Hello,
    Node,
    Reading,
    Request,
    Scenario,
    Sequence,
    Stream,
    Task,
    Wire,
    Worker,
    token,
)

from tokenmill.cluster.course import Course, Deliver, Fail, NeedDecode, NeedPrefill, Process
from tokenmill.cluster.course import Effect as CourseEffect
from tokenmill.cluster.course import Send as SendTo
from tokenmill.core.errors import Unavailable
from tokenmill.core.handover import (
    Prefill,
    Ready,
    Refused,
    Release,
    Reserve,
    Reserved,
    Start,
    Taken,
    full_positions,
    tokens_of,
)
from tokenmill.core.messages import Abort, Failed, Generate, SequenceOutput
from tokenmill.core.types import FRAME, FinishReason, SamplingParams
from tokenmill.worker.handover.effects import Compute, Drop, LeaseEffect, Open, Read, Refuse, ReservationEffect, Run, Send, StopReading
from tokenmill.worker.handover.lease import Chunk
from tokenmill.worker.handover.reservation import Outcome

Event = tuple[str, Callable[["World"], None]]


REPLAYED = (Reserved, Ready, Taken, Refused, Start, Release, SequenceOutput, Failed)
"""What may come twice. Orders that begin something may not: a second one is simply another order."""


MOST_ATTEMPTS = 12
"""More than the workers that a request can meet in any scenario."""


def checksum(names: list[bytes | None]) -> bytes:
    return b"".join(name or b"?" for name in names)


class World:
    """One state. `events` are what can happen next, each a name and what turns a branch of this state into the next."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.nodes: dict[str, Node] = {"client": Client(scenario.requests), "gateway": Gateway(), "ghost": Ghost()}
        self.fresh: set[str] = set()
        self.noted: list[str] = []  # what the last event led to, to be counted
        prefill = {f"p{i}": scenario.prefill_frames for i in range(1, scenario.prefill + 1)}
        self.sizes = prefill | {f"d{i}": scenario.decode_frames for i in range(1, scenario.decode + 1)}
        for name, n_frames in self.sizes.items():
            worker = Worker(name, n_frames)
            self.nodes |= {name: worker, f"gateway>{name}": Stream(), f"{name}>gateway": Stream()}
            self.gateway.known[name] = worker.process
        for request in scenario.requests:
            self.submit(request)

    @property
    def key(self) -> bytes:
        """The same for equal states alone."""
        return blake2b(b"".join([node.key for node in self.nodes.values()]), digest_size=12).digest()

    def after(self, event: Event) -> World:
        other = copy.copy(self)
        other.nodes, other.fresh, other.noted = dict(self.nodes), set(), []
        event[1](other)
        return other

    def change(self, name: str) -> Any:
        """A part, to be changed."""
        if name not in self.fresh:
            self.fresh.add(name)
            self.nodes[name] = self.nodes[name].branch()
        return self.nodes[name]

    def at(self, name: str) -> Any:
        """A part, to be looked at."""
        return self.nodes[name]

    @property
    def gateway(self) -> Gateway:
        return self.change("gateway")  # type: ignore[no-any-return]

    @property
    def client(self) -> Client:
        return self.change("client")  # type: ignore[no-any-return]

    @property
    def ghost(self) -> Ghost:
        return self.change("ghost")  # type: ignore[no-any-return]

    def worker(self, name: str) -> Worker:
        return self.change(name)  # type: ignore[no-any-return]

    # What can happen

    def events(self) -> list[Event]:
        """What happens sooner or later; nothing: this is the end. Only after some faults is it the clock that goes on with it."""
        events = list(self.happenings())
        return list(self.ticks()) if not events and self.at("ghost").unlucky else events

    def faults(self) -> list[Event]:
        """What may happen besides."""
        if self.at("ghost").faults == self.scenario.faults:
            return []
        wanted = [(kind, name, act) for kind, name, act in self.possible_faults() if kind in self.scenario.kinds]
        return [(f"{kind}: {name}", lambda w, k=kind, a=act: w.fault(k, a)) for kind, name, act in wanted]

    def happenings(self) -> Iterator[Event]:
        for name in self.sizes:
            if self.at(f"gateway>{name}").wires:
                yield f"arrives: gateway>{name}", lambda w, n=name: w.arrive_at_worker(n)
            if self.at(f"{name}>gateway").wires:
                yield f"arrives: {name}>gateway", lambda w, n=name: w.arrive_at_gateway(n)
            worker: Worker = self.at(name)
            if worker.alive:
                yield from self.steps(worker)
        for number, (request_id, need) in enumerate(self.at("gateway").needs):
            yield f"router answers {request_id}: {type(need).__name__}", lambda w, i=number: w.answer(i)

    def steps(self, worker: Worker) -> Iterator[Event]:
        name = worker.name
        for nonce in worker.tasks:
            yield f"{name} computes for {nonce!r}", lambda w, k=nonce: w.compute(name, k)
        for key in worker.sequences:
            yield f"{name} decodes {key}", lambda w, k=key: w.decode(name, k)
        for nonce, reading in worker.reads.items():
            if not reading.stuck:
                yield f"{name} reads for {nonce!r}", lambda w, k=nonce: w.read(name, k)
            if reading.stopped:
                yield f"{name} stops to read for {nonce!r}", lambda w, k=nonce: w.read_fails(name, k, "lost")

    def ticks(self) -> Iterator[Event]:
        for name in self.sizes:
            worker: Worker = self.at(name)
            if worker.alive and worker.deadlines():
                yield f"{name}: a deadline is over", lambda w, n=name: w.tick(n)

    def fault(self, kind: str, act: Callable[[World], None]) -> None:
        self.ghost.faults += 1
        self.ghost.unlucky |= kind in ("stuck", "replay")
        act(self)

    def possible_faults(self) -> Iterator[tuple[str, str, Callable[[World], None]]]:
        gateway: Gateway = self.at("gateway")
        for name in self.sizes:
            worker: Worker = self.at(name)
            if not worker.alive:
                continue
            for kept in range(len(self.at(f"{name}>gateway").wires) + 1):
                yield "death", f"{name}, after {kept} messages", lambda w, n=name, k=kept: w.die(n, k, again=True)
                yield "loss", f"{name}, after {kept} messages", lambda w, n=name, k=kept: w.die(n, k, again=False)
            if name in gateway.known:
                yield "suspicion", name, lambda w, n=name: w.suspect(n)
            wires = self.at(f"gateway>{name}").wires
            if wires and isinstance(wires[0].message, Reserve | Prefill | Generate):
                yield "refusal", name, lambda w, n=name: w.arrive_at_worker(n, refuse=True)
            yield from self.possible_faults_inside(worker)
        yield from (("tick", what, act) for what, act in self.ticks())
        for request_id, course in gateway.courses.items():
            if not course.over:
                yield "cancel", request_id, lambda w, r=request_id: w.abort(r, None, FinishReason.ABORT)
            if len(course._open) > 1:
                for choice in course._open:
                    yield "stop", f"{request_id}/{choice}", lambda w, r=request_id, c=choice: w.abort(r, c, FinishReason.STOP)
        for delivered in (True, False):
            yield "gateway", f"its last messages {delivered}", lambda w, d=delivered: w.restart_gateway(d)
        for number, (stream, wire) in enumerate(self.at("ghost").sent):
            yield "replay", f"{stream} {wire.message}", lambda w, i=number: w.replay(i)

    def possible_faults_inside(self, worker: Worker) -> Iterator[tuple[str, str, Callable[[World], None]]]:
        name = worker.name
        for nonce, reading in worker.reads.items():
            if not reading.stuck:
                yield "read", f"{name} {nonce!r}", lambda w, k=nonce: w.read_fails(name, k, "lost")
                yield "garbage", f"{name} {nonce!r}", lambda w, k=nonce: w.read_garbage(name, k)
                yield "stuck", f"{name} {nonce!r}", lambda w, k=nonce: w.get_stuck(name, k)
        for nonce in worker.tasks:
            yield "failure", f"{name} {nonce!r}", lambda w, k=nonce: w.fail_task(name, k)
        for key in worker.sequences:
            yield "failure", f"{name} {key}", lambda w, k=key: w.fail_sequence(name, k)

    # The gateway

    def submit(self, request: Request) -> None:
        prompt = [request.prompt] * request.length
        params = SamplingParams(n=request.choices, max_tokens=request.max_tokens, seed=1)
        generate = Generate(request_id=request.id, prompt=prompt, params=params)
        course = Course(generate, separate=request.separate, policy=self.scenario.policy)
        self.gateway.courses[request.id] = course
        self.steer(request.id, course.begin())

    def steer(self, request_id: str, effects: list[CourseEffect], source: Process | None = None, epoch: int = 0) -> None:
        """source, epoch: of the message that made the course do this, if one did."""
        for effect in effects:
            match effect:
                case NeedDecode() | NeedPrefill():
                    self.gateway.needs = (*self.gateway.needs, (request_id, effect))
                case SendTo(to, message):
                    self.send_to_worker(to, message)
                case Deliver(output):
                    if output.tokens:
                        assert source is not None, "tokens from nowhere"
                        assert epoch == self.ghost.attempts[request_id], f"a token of epoch {epoch} reaches the client"
                        assert (source.boot, request_id) not in self.ghost.released, f"{source.name} was told to let go, but is listened to"
                    self.deliver(output)
                case Fail():
                    open_choices = [key for key in self.client.given if key[0] == request_id and key not in self.client.ends]
                    assert open_choices, "a request fails that has ended"
                    self.client.ends |= dict.fromkeys(open_choices, "failed")

    def deliver(self, output: SequenceOutput) -> None:
        key = output.request_id, output.choice
        assert key not in self.client.ends, f"{key} gets an output after its last"
        for given in output.tokens:
            right = token(*key, len(self.client.given[key]))
            assert given == right, f"{key} gets token {given} after {self.client.given[key]}"
            self.client.given[key] += (given,)
        if output.finish_reason is not None:
            self.client.ends[key] = output.finish_reason.value

    def send_to_worker(self, to: Process, message: Any) -> None:
        match message:
            case Generate() | Reserve():
                generate = message if isinstance(message, Generate) else message.generate
                assert generate.epoch > self.ghost.attempts.get(generate.request_id, 0), "an epoch is used twice"
                assert generate.epoch <= MOST_ATTEMPTS, f"{generate.request_id} is attempted for ever"
                self.ghost.attempts[generate.request_id] = generate.epoch
                self.ghost.released = frozenset(entry for entry in self.ghost.released if entry[1] != generate.request_id)
            case Release(request_id):
                self.ghost.released |= {(to.boot, request_id)}
        worker: Worker = self.at(to.name)
        if worker.alive and worker.process == to and worker.link == self.at("gateway").start:
            self.put(f"gateway>{to.name}", message)

    def put(self, stream: str, message: Any) -> None:
        wire = Wire.of(message)
        self.change(stream).wires += (wire,)
        remembered = "replay" in self.scenario.kinds and self.at("ghost").faults < self.scenario.faults
        if remembered and isinstance(message, REPLAYED) and (stream, wire) not in self.at("ghost").sent:
            self.ghost.sent += ((stream, wire),)

    def answer(self, number: int) -> None:
        request_id, need = self.gateway.needs[number]
        self.gateway.needs = tuple(n for i, n in enumerate(self.gateway.needs) if i != number)
        role = "d" if isinstance(need, NeedDecode) else "p"
        candidates = [process for name, process in sorted(self.gateway.known.items()) if name[0] == role and name not in need.excluding]
        course = self.gateway.course(request_id)
        if isinstance(need, NeedDecode):
            self.steer(request_id, course.decode_worker(candidates[0] if candidates else Unavailable("none")))
        else:
            self.steer(request_id, course.prefill_worker(candidates[0] if candidates else None))

    def arrive_at_gateway(self, name: str) -> None:
        stream: Stream = self.change(f"{name}>gateway")
        (wire, *later) = stream.wires
        stream.wires = tuple(later)
        match wire.message:
            case Ended():
                process = self.gateway.known.pop(name, None)
                if process is not None:
                    self.tell_courses(lambda course: course.lost(process))
            case Hello(boot):
                self.gateway.known[name] = Process(name, boot)
            case message:
                request_id = message.ticket.request_id if isinstance(message, Ready) else message.request_id
                epoch = message.ticket.epoch if isinstance(message, Ready) else message.epoch
                process = self.gateway.known.get(name)
                if process is not None and request_id in self.gateway.courses:
                    course = self.gateway.course(request_id)
                    self.steer(request_id, course.heard(process, message), process, epoch)

    def tell_courses(self, event: Callable[[Course], list[CourseEffect]]) -> None:
        for request_id in self.at("gateway").courses:
            self.steer(request_id, event(self.gateway.course(request_id)))

    def suspect(self, name: str) -> None:
        process = self.at("gateway").known[name]
        self.tell_courses(lambda course: course.hung(process))

    def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None:
        self.steer(request_id, self.gateway.course(request_id).abort(choice, reason))

    def restart_gateway(self, delivered: bool) -> None:
        """Its streams end, with or without what it sent last. Clients see that, and send again what had not ended."""
        self.nodes["gateway"] = Gateway(self.at("gateway").start + 1)
        self.ghost.attempts, self.ghost.released = {}, frozenset()
        for name in self.sizes:
            self.change(f"{name}>gateway").wires = ()
            if not delivered:
                self.change(f"gateway>{name}").wires = ()
            if self.at(name).alive:
                self.put(f"gateway>{name}", Ended(""))
        for request in self.scenario.requests:
            keys = [(request.id, choice) for choice in range(request.choices)]
            if any(key not in self.client.ends for key in keys):
                for key in keys:
                    self.client.ends.pop(key, None)
                    self.client.given[key] = ()
                self.submit(request)

    # Workers

    def arrive_at_worker(self, name: str, refuse: bool = False) -> None:
        stream: Stream = self.change(f"gateway>{name}")
        (wire, *later) = stream.wires
        stream.wires = tuple(later)
        worker = self.worker(name)
        match wire.message:
            case Ended():
                self.close(worker)
            case Reserve() as reserve:
                worker.nonces += 1
                nonce = f"{worker.process.boot}#{worker.nonces}".encode()
                self.perform(worker, worker.reservations.reserve(reserve, nonce, worker.now), refuse)
            case Prefill() as prefill:
                self.perform(worker, worker.leases.prefill(prefill), refuse)
            case Ready() as ready:
                self.perform(worker, worker.reservations.ready(ready, worker.now))
            case Start() as start:
                self.perform(worker, worker.reservations.start(start, worker.now))
            case Taken() as taken:
                self.perform(worker, worker.leases.taken(taken, worker.now))
            case Refused() as refused:
                self.perform(worker, worker.leases.refused(refused))
            case Release() as release:
                effects = worker.leases.release(release) or worker.reservations.release(release)
                self.perform(worker, effects)
                if not effects:
                    self.end_sequences(worker, release)
            case Generate() as generate:
                self.run_whole(worker, generate, refuse)
            case Abort(request_id, choice):
                for key in [key for key in worker.sequences if key == (request_id, choice)]:
                    self.end_sequence(worker, key)

    def perform(self, worker: Worker, effects: list[LeaseEffect] | list[ReservationEffect], refuse: bool = False) -> None:
        """refuse: the engine takes nothing new."""
        queue: list[LeaseEffect | ReservationEffect] = list(effects)
        full = Unavailable("no room")
        while queue:
            match queue.pop(0):
                case Send(message):
                    self.send_to_gateway(worker, message)
                case Compute(prefill):
                    have = None if refuse else worker.acquire(prefill.nonce, tokens_of(prefill.generate))
                    if have is None:
                        queue = [*worker.leases.rejected(prefill.nonce, full), *queue]
                    else:
                        worker.tasks[prefill.nonce] = Task(prefill, have)
                case Open(reserve, nonce):
                    have = None if refuse else worker.acquire(nonce, tokens_of(reserve.generate))
                    if have is None:
                        queue = [*worker.reservations.rejected(nonce, full), *queue]
                    else:
                        worker.waiting[nonce] = reserve.generate
                        queue = [*worker.reservations.opened(nonce, have), *queue]
                case Read(nonce, ticket):
                    generate = worker.waiting[nonce]
                    meant = nonce, worker.process.boot, generate.request_id, generate.epoch
                    named = ticket.nonce, ticket.decode_boot, ticket.request_id, ticket.epoch
                    assert named == meant, "a ticket of another reservation is used"
                    assert nonce not in worker.reads, "two reads at a time"
                    worker.write(nonce, ticket, [None] * len(ticket.frames[0]))
                    worker.reads[nonce] = Reading(ticket)
                case StopReading(nonce):
                    worker.reads[nonce] = msgspec.structs.replace(worker.reads[nonce], stopped=True)
                case Run(nonce, request_id, _, computed, tokens):
                    assert nonce not in worker.reads, "a sequence runs while its frames are written to"
                    worker.check(nonce, computed)
                    self.noted.append(f"runs with {computed} positions")
                    self.run(worker, nonce, request_id, computed, tokens)
                case Drop(nonce, why, right):
                    self.noted.append(f"{'reservation' if nonce in worker.waiting else 'lease'} {why}")
                    self.drop(worker, nonce, why, right)
                case Refuse(reason):
                    self.noted.append(f"chunk {reason}")

    def send_to_gateway(self, worker: Worker, message: Any) -> None:
        if worker.link == self.at("gateway").start:
            self.put(f"{worker.name}>gateway", message)

    def drop(self, worker: Worker, nonce: bytes, why: str, right: int) -> None:
        if nonce in worker.waiting:
            assert nonce not in worker.reads, "frames are freed that a connector writes to"
            del worker.waiting[nonce]
            worker.free(nonce, right)
            return
        task = worker.tasks.pop(nonce, None)
        limit = full_positions(len(worker.tables[nonce].tokens))
        copied = worker.copied.pop(nonce, 0)
        assert why != "taken" or copied == limit, f"a lease ends when {copied} of {limit} positions have been copied"
        worker.free(nonce, limit if task is None else task.computed)

    def run(self, worker: Worker, nonce: bytes, request_id: str, computed: int, tokens: tuple[int, ...]) -> None:
        generate = worker.waiting.pop(nonce)
        output = (*generate.output.get(0, ()), *tokens)
        worker.tables[nonce] = worker.tables[nonce]._replace(tokens=(*generate.prompt, *output))
        assert computed < len(worker.tables[nonce].tokens), "nothing is left to be computed, so that there is no next token"
        worker.fill(nonce, full_positions(computed), FRAME * len(worker.tables[nonce].numbers))
        self.begin(worker, generate, 0, nonce, len(output))

    def begin(self, worker: Worker, generate: Generate, choice: int, owner: bytes, index: int) -> None:
        key = generate.request_id, choice
        assert key not in worker.sequences, f"{key} runs twice on {worker.name}"
        worker.sequences[key] = Sequence(generate, choice, owner, index)

    def run_whole(self, worker: Worker, generate: Generate, refuse: bool) -> None:
        outputs = generate.output or {choice: [] for choice in range(generate.params.n)}
        for choice, output in outputs.items():
            owner = f"{generate.request_id}/{choice}/{generate.epoch}".encode()
            tokens = [*generate.prompt, *output]
            have = None if refuse else worker.acquire(owner, tokens)
            if have is None:
                assert choice == min(outputs), "a scenario must have room for all choices"
                error = Unavailable("no room")
                self.send_to_gateway(worker, Failed.of(error, generate.request_id, generate.epoch))
                return
            worker.fill(owner, have, full_positions(len(tokens)))
            self.begin(worker, generate, choice, owner, len(output))

    def compute(self, name: str, nonce: bytes) -> None:
        """A step over the next frame of a prompt, and with the last one over what is behind it."""
        worker = self.worker(name)
        task = worker.tasks[nonce]
        generate = task.prefill.generate
        limit = full_positions(len(tokens_of(generate)))
        computed = min(task.computed + FRAME, limit)
        worker.fill(nonce, task.computed, computed)
        worker.tasks[nonce] = Task(task.prefill, computed)
        span = worker.leases.next_chunk(nonce, computed)
        if span is not None:
            numbers = worker.tables[nonce].numbers[span[0] // FRAME : span[1] // FRAME]
            chunk = Chunk(*span, (numbers,), checksum([worker.frames[number].content for number in numbers]))
            self.perform(worker, worker.leases.chunk_computed(nonce, chunk))
        if computed == limit:
            self.perform(worker, worker.leases.prompt_computed(nonce, worker.now))
            worker.tasks.pop(nonce, None)
            self.tell(worker, generate, 0, len(generate.output.get(0, ())))

    def decode(self, name: str, key: tuple[str, int]) -> None:
        worker = self.worker(name)
        sequence = worker.sequences[key]
        worker.check(sequence.owner, FRAME * len(worker.tables[sequence.owner].numbers))
        self.tell(worker, sequence.generate, sequence.choice, sequence.index)
        worker.sequences[key] = msgspec.structs.replace(sequence, index=sequence.index + 1)
        if sequence.index + 1 == sequence.generate.params.max_tokens:
            self.end_sequence(worker, key)

    def tell(self, worker: Worker, generate: Generate, choice: int, index: int) -> None:
        finish = FinishReason.LENGTH if index + 1 == generate.params.max_tokens else None
        made = [token(generate.request_id, choice, index)]
        output = SequenceOutput(generate.request_id, choice, made, finish_reason=finish, epoch=generate.epoch, index=index)
        self.send_to_gateway(worker, output)

    def end_sequence(self, worker: Worker, key: tuple[str, int]) -> None:
        owner = worker.sequences.pop(key).owner
        worker.free(owner, FRAME * len(worker.tables[owner].numbers))

    def end_sequences(self, worker: Worker, release: Release) -> None:
        for key, sequence in list(worker.sequences.items()):
            if key[0] == release.request_id and sequence.generate.epoch == release.epoch:
                self.end_sequence(worker, key)

    def close(self, worker: Worker) -> None:
        """The stream to the gateway has ended: nobody wants what is here. There is a new one."""
        self.perform(worker, worker.leases.closed())
        self.perform(worker, worker.reservations.closed())
        for key in list(worker.sequences):
            self.end_sequence(worker, key)
        worker.link = self.at("gateway").start
        self.put(f"{worker.name}>gateway", Hello(worker.process.boot))

    def tick(self, name: str) -> None:
        worker = self.worker(name)
        worker.now = min(worker.deadlines())
        self.perform(worker, worker.leases.tick(worker.now))
        self.perform(worker, worker.reservations.tick(worker.now))

    def read(self, name: str, nonce: bytes) -> None:
        """A read ends with whatever is there, if there is somebody."""
        worker = self.worker(name)
        ticket = worker.reads[nonce].ticket
        source: Worker = self.at(ticket.address)
        if not source.alive:
            self.read_fails(name, nonce, "lost")
            return
        names = [source.frames[number].content for number in ticket.frames[0]]
        self.read_ends(worker, nonce, names)

    def read_garbage(self, name: str, nonce: bytes) -> None:
        worker = self.worker(name)
        self.read_ends(worker, nonce, [GARBAGE] * len(worker.reads[nonce].ticket.frames[0]))

    def read_ends(self, worker: Worker, nonce: bytes, names: list[bytes | None]) -> None:
        ticket = worker.reads[nonce].ticket
        worker.write(nonce, ticket, names)
        right = checksum(names) == ticket.checksum
        if right and nonce in self.at(ticket.address).tables:
            self.worker(ticket.address).copied[nonce] = ticket.stop
        self.end_read(worker, nonce, "ok" if right else "corrupt")

    def read_fails(self, name: str, nonce: bytes, outcome: Outcome) -> None:
        self.end_read(self.worker(name), nonce, outcome)

    def end_read(self, worker: Worker, nonce: bytes, outcome: Outcome) -> None:
        del worker.reads[nonce]
        self.perform(worker, worker.reservations.read_ended(nonce, outcome, worker.now))

    def get_stuck(self, name: str, nonce: bytes) -> None:
        worker = self.worker(name)
        worker.reads[nonce] = msgspec.structs.replace(worker.reads[nonce], stuck=True)

    # Other faults

    def die(self, name: str, kept: int, again: bool) -> None:
        """A process ends, and of what it sent only the first `kept` messages arrive. again: another starts at once, at the same address."""
        worker: Worker = self.at(name)
        heard: Stream = self.change(f"{name}>gateway")
        heard.wires = heard.wires[:kept]
        self.change(f"gateway>{name}").wires = ()
        self.put(f"{name}>gateway", Ended(worker.process.boot))
        successor = Worker(name, self.sizes[name], worker.start + 1, self.at("gateway").start)
        successor.alive = again
        self.nodes[name] = successor
        self.fresh.add(name)
        if again:
            self.put(f"{name}>gateway", Hello(successor.process.boot))

    def fail_task(self, name: str, nonce: bytes) -> None:
        worker = self.worker(name)
        self.perform(worker, worker.leases.failed(nonce, Unavailable("the engine gave it up")))

    def fail_sequence(self, name: str, key: tuple[str, int]) -> None:
        worker = self.worker(name)
        generate = worker.sequences[key].generate
        for other in [other for other in worker.sequences if other[0] == key[0]]:
            self.end_sequence(worker, other)
        self.send_to_gateway(worker, Failed.of(Unavailable("the engine gave it up"), generate.request_id, generate.epoch))

    def replay(self, number: int) -> None:
        stream, wire = self.ghost.sent[number]
        self.change(stream).wires += (wire,)

    # What must hold when nothing can happen any more

    def check_end(self) -> None:
        client: Client = self.at("client")
        for key in client.given:
            assert key in client.ends, f"{key} never ends"
        assert not self.at("gateway").needs, "a question is not answered"
        for request in self.scenario.requests:
            for key in ((request.id, choice) for choice in range(request.choices)):
                whole = client.ends[key] != "length" or len(client.given[key]) == request.max_tokens
                assert whole, f"{key} ends with {client.given[key]}"
        for name in self.sizes:
            worker: Worker = self.at(name)
            assert not worker.alive or worker.idle, f"{name} holds something for good: {worker.state()}"
