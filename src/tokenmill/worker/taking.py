"""Prompts that are computed elsewhere and decoded here: carries out what the reservations (handover/reservation.py) want done."""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tokenmill.core.clock import Clock
from tokenmill.core.errors import TokenmillError
from tokenmill.core.handover import NONCE_BYTES, FromWorker, Ready, Refusal, Release, Reserve, Start, Ticket
from tokenmill.core.messages import Failed, Generate
from tokenmill.worker.handover.effects import Drop, Open, Read, Refuse, ReservationEffect, Run, Send, StopReading
from tokenmill.worker.handover.reservation import Outcome, Reservations, Target

if TYPE_CHECKING:
    from tokenmill.engine.engine import Engine
    from tokenmill.engine.transit import Gate
    from tokenmill.transfer.reader import Reader


class ReadEnded(NamedTuple):
    """A thread has done with a read. why: for the log, unless it is ok."""

    nonce: bytes
    stop: int
    outcome: Outcome
    why: str
    nbytes: int
    seconds: float


class Taking:
    """The reservations of one worker, its engine's frames for them, and the reader that fills those.

    send: to the gateway. post: `ReadEnded` for `read_ended`, from any thread. A reservation for which there is no room waits for it, the
    most urgent first. refusals: chunks that were not taken. reads, read_bytes, read_seconds: those that were. waited_seconds: from
    the news of the end of prompts to when the last of their frames had come.
    """

    def __init__(
        self,
        engine: Engine,
        reader: Reader,
        target: Target,
        send: Callable[[FromWorker], None],
        post: Callable[[ReadEnded], None],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._send = send
        self._post = post
        self._clock = clock
        self._reservations = Reservations(target)
        self._generates: dict[bytes, Generate] = {}
        self._waiting: dict[bytes, Reserve] = {}  # for room
        self._started: dict[bytes, float] = {}  # those that wait for their last frames
        self.refusals: Counter[Refusal] = Counter()
        self.reads = 0
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.waited_seconds = 0.0

    def __len__(self) -> int:
        return len(self._reservations)

    def reserve(self, message: Reserve) -> None:
        self._do(self._reservations.reserve(message, secrets.token_bytes(NONCE_BYTES), self._clock.now()))

    def ready(self, message: Ready) -> None:
        self._do(self._reservations.ready(message, self._clock.now()))

    def start(self, message: Start) -> None:
        now, attempt = self._clock.now(), (message.request_id, message.epoch)
        for nonce, generate in self._generates.items():
            if (generate.request_id, generate.epoch) == attempt:
                self._started[nonce] = now
        self._do(self._reservations.start(message, now))

    def release(self, message: Release) -> bool:
        """False: there is no reservation of this attempt."""
        effects = self._reservations.release(message)
        self._do(effects)
        return bool(effects)

    def closed(self) -> None:
        """The gateway is gone."""
        self._do(self._reservations.closed())

    def read_ended(self, message: ReadEnded) -> None:
        outcome = message.outcome if message.nonce in self._engine.transit else "displaced"
        if outcome == "ok":
            self._engine.transit.land(message.nonce, message.stop)
            self.reads += 1
            self.read_bytes += message.nbytes
            self.read_seconds += message.seconds
        self._do(self._reservations.read_ended(message.nonce, outcome, self._clock.now(), message.nbytes, message.seconds))

    def make_room(self) -> None:
        """Frames may have become free."""
        for nonce, reserve in sorted(self._waiting.items(), key=lambda item: item[1].generate.priority):
            if nonce in self._waiting and not self._open(nonce, reserve):
                return

    def tick(self) -> None:
        self._do(self._reservations.tick(self._clock.now()))

    def deadline(self) -> float | None:
        return self._reservations.deadline()

    def _do(self, effects: Sequence[ReservationEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self._send(message)
                case Open(reserve, nonce):
                    self._waiting[nonce] = reserve
                    self.make_room()
                case Read(nonce, ticket):
                    self._read(nonce, ticket)
                case StopReading(nonce):
                    if nonce in self._engine.transit:
                        self._engine.transit.gate(nonce).stop()
                case Run():
                    self._run(effect)
                case Drop(nonce):
                    for of in (self._generates, self._started, self._waiting):
                        of.pop(nonce, None)
                    self._engine.transit.release(nonce)
                case Refuse(reason):
                    self.refusals[reason] += 1

    def _open(self, nonce: bytes, reserve: Reserve) -> bool:
        """False: there is no room yet."""
        try:
            have = self._engine.reserve(nonce, reserve.generate)
        except TokenmillError as error:
            del self._waiting[nonce]
            self._do(self._reservations.rejected(nonce, error))
            return True
        if have is None:
            return False
        del self._waiting[nonce]
        self._generates[nonce] = reserve.generate
        self._do(self._reservations.opened(nonce, have))
        return True

    def _read(self, nonce: bytes, ticket: Ticket) -> None:
        transit = self._engine.transit
        place = transit.place(nonce, ticket.stop) if nonce in transit else None
        if place is None:  # it has given way to sequences that run
            self._do(self._reservations.read_ended(nonce, "displaced", self._clock.now()))
            return
        mine = [array("i", (frame for frame in of_group if frame >= 0)) for of_group in place.frames]
        work = (nonce, ticket, mine, transit.gate(nonce))
        threading.Thread(target=self._copy, args=work, name="read", daemon=True).start()

    def _copy(self, nonce: bytes, ticket: Ticket, mine: list[array[int]], gate: Gate) -> None:
        """In a thread of its own, so that a peer that hangs holds up nobody else's."""
        began, nbytes = time.monotonic(), self._engine.memory.frames(mine).nbytes
        outcome: Outcome = "lost"
        why = "a fault of this worker, in its log"
        try:
            status = self._reader.read(ticket.address, ticket.prefill_boot, nonce, ticket.frames, mine, ticket.checksum, gate)
            outcome, why = status.outcome, f"{status.reason} {status.detail}"
        finally:  # whatever happens: the reservation keeps its frames until it is told
            self._post(ReadEnded(nonce, ticket.stop, outcome, why, nbytes, time.monotonic() - began))

    def _run(self, run: Run) -> None:
        generate = self._generates.pop(run.nonce)
        self._engine.transit.release(run.nonce)
        self.waited_seconds += self._clock.now() - self._started.pop(run.nonce)
        if run.tokens:
            output = {0: [*generate.output.get(0, []), *run.tokens]}
            generate = msgspec.structs.replace(generate, output=output)
        try:
            self._engine.add(generate)
        except TokenmillError as error:
            self._send(Failed.of(error, run.request_id, run.epoch))
