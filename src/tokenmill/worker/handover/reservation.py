"""The decode worker's part: sequences that wait for frames of their prompts, and never run with frames of another."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

from tokenmill.core.errors import TokenmillError, Unavailable
from tokenmill.core.handover import (
    WAITED_TOO_LONG,
    Ready,
    Refusal,
    Refused,
    Release,
    Reserve,
    Reserved,
    Start,
    Taken,
    Ticket,
    frames_of_chunk,
    full_positions,
    token_hash,
    tokens_of,
)
from tokenmill.core.messages import Failed
from tokenmill.core.types import FRAME
from tokenmill.worker.handover.effects import Drop, End, Open, Read, Refuse, ReservationEffect, Run, Send, StopReading

Outcome: TypeAlias = Literal["ok", "refused", "lost", "corrupt", "displaced"]
"""How a read ended: refused: the other worker did not allow it. lost: it cannot be reached. corrupt: the checksum of what has come is
not the ticket's. displaced: there are no frames any more to read into."""


class Target(NamedTuple):
    """This process, as tickets for it have to be. windows: of each KV group, in positions; None where all are kept."""

    boot: str
    fingerprint: str
    windows: tuple[int | None, ...]


class Queued(NamedTuple):
    """A ticket that is in order, and when it becomes too old to be read."""

    ticket: Ticket
    until: float


class Reservation(msgspec.Struct, frozen=True):
    """One waiting sequence.

    limit: where its full frames end. deadline: when it, or a read that hangs, is given up if nothing happens until then. have: positions
    whose frames are here and right. queue: tickets for what follows, without a gap. reading: the one whose frames are being copied.
    stopping: that was told to stop. chunks: tickets accepted. source: the boot of the worker that issued them. refused: why no more are
    accepted. told: whether that worker knows. start: the message that lets it run. over: why it ends instead; then it only waits for a
    read to end.
    """

    reserve: Reserve
    nonce: bytes
    limit: int
    deadline: float
    have: int = 0
    queue: tuple[Queued, ...] = ()
    reading: Ticket | None = None
    stopping: bool = False
    chunks: int = 0
    source: str | None = None
    refused: Refusal | None = None
    told: bool = False
    start: Start | None = None
    over: End | None = None

    @property
    def attempt(self) -> tuple[str, int]:
        return self.reserve.generate.request_id, self.reserve.generate.epoch

    @property
    def promised(self) -> int:
        """Positions that are here or on accepted tickets."""
        if self.queue:
            return self.queue[-1].ticket.stop
        return self.have if self.reading is None else self.reading.stop

    def but(self, **changes: object) -> Reservation:
        return msgspec.structs.replace(self, **changes)


def verify(ticket: Ticket, reservation: Reservation, target: Target) -> Refusal | None:
    """What is wrong with a ticket, or None: it names what this reservation needs next. Pure, and looks at every field but the checksum
    and the address, which the connector holds what it reads against."""
    generate = reservation.reserve.generate
    frames = tuple(frames_of_chunk(ticket.start, ticket.stop, window) for window in target.windows)
    checks: tuple[tuple[Refusal, bool], ...] = (
        ("nonce", ticket.nonce == reservation.nonce),
        ("request", ticket.request_id == generate.request_id),
        ("epoch", ticket.epoch == generate.epoch),
        ("decode_boot", ticket.decode_boot == target.boot),
        ("prefill_boot", reservation.source in (None, ticket.prefill_boot) and ticket.prefill_boot != ""),
        ("fingerprint", ticket.fingerprint == target.fingerprint),
        ("tenant", ticket.tenant == generate.cache_salt),
        ("chunk", ticket.chunk == reservation.chunks),
        ("range", ticket.start == reservation.promised and ticket.start < ticket.stop <= reservation.limit and ticket.stop % FRAME == 0),
        ("range", ticket.last == (ticket.stop == reservation.limit)),
        ("frames", tuple(map(len, ticket.frames)) == frames),
        ("frames", _are_distinct([frame for group in ticket.frames for frame in group])),
        ("tokens", ticket.token_hash == token_hash(tokens_of(generate)[: ticket.stop])),
        ("expired", ticket.expiry > 0),
    )
    return next((reason for reason, right in checks if not right), None)


def _are_distinct(frames: list[int]) -> bool:
    return len(set(frames)) == len(frames) and all(frame >= 0 for frame in frames)


class Reservations:
    """All reservations of one worker, by nonce. Times are seconds on any one clock."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._reservations: dict[bytes, Reservation] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def reserve(self, message: Reserve, nonce: bytes, now: float) -> list[ReservationEffect]:
        """The gateway wants a sequence to wait here. nonce: 16 bytes drawn for it, never used before."""
        assert nonce not in self._reservations, "a nonce is used once"
        generate = message.generate
        if self._find(generate.request_id, generate.epoch) is not None:
            error = Unavailable("this attempt has a reservation already: it is tried in another way")
            return [Send(Failed.of(error, generate.request_id, generate.epoch))]
        limit = full_positions(len(tokens_of(generate)))
        self._reservations[nonce] = Reservation(message, nonce, limit, now + message.expiry)
        return [Open(message, nonce)]

    def opened(self, nonce: bytes, have: int) -> list[ReservationEffect]:
        """The engine has taken frames; of the first `have` positions they are right already."""
        reservation = self._reservations[nonce] = self._reservations[nonce].but(have=have)
        assert have % FRAME == 0, f"{have} positions are no whole frames"
        assert have <= reservation.limit, f"{have} of {reservation.limit} positions"
        return [Send(Reserved(*reservation.attempt, nonce, have))]

    def rejected(self, nonce: bytes, error: TokenmillError) -> list[ReservationEffect]:
        """The engine did not take the sequence."""
        reservation = self._reservations.pop(nonce)
        return [Send(Failed.of(error, *reservation.attempt))]

    def ready(self, message: Ready, now: float) -> list[ReservationEffect]:
        """A ticket has come. One that does not match is refused, and so is all that would follow it."""
        ticket = message.ticket
        reservation = self._reservations.get(ticket.nonce)
        if reservation is None or reservation.over is not None:
            return [Refuse("nonce")]
        if reservation.refused is not None:
            return []
        wrong = verify(ticket, reservation, self._target)
        if wrong is not None:
            return [Refuse(wrong), *self._go_on(reservation.but(refused=wrong), now)]
        queue = (*reservation.queue, Queued(ticket, now + ticket.expiry))
        return self._go_on(reservation.but(queue=queue, chunks=ticket.chunk + 1, source=ticket.prefill_boot), now)

    def read_ended(self, nonce: bytes, outcome: Outcome, now: float, nbytes: int = 0, seconds: float = 0.0) -> list[ReservationEffect]:
        """The connector no longer touches the frames of the read under way. nbytes, seconds: of the copy, to be told."""
        reservation = self._reservations[nonce]
        ticket = reservation.reading
        assert ticket is not None, "a read that nobody asked for has ended"
        have = ticket.stop if outcome == "ok" else reservation.have
        reservation = reservation.but(reading=None, stopping=False, have=have)
        if reservation.over is not None:
            return self._drop(reservation, reservation.over)
        if outcome == "ok":
            return [Send(Taken(*reservation.attempt, nonce, ticket.chunk, nbytes, seconds)), *self._go_on(reservation, now)]
        return [Refuse(outcome), *self._go_on(reservation.but(refused=outcome, queue=()), now)]

    def start(self, message: Start, now: float) -> list[ReservationEffect]:
        """No ticket will come any more, and the sequence is to run."""
        reservation = self._find(message.request_id, message.epoch)
        if reservation is None:
            error = Unavailable("this worker has no reservation for the request: its time is over, or it has been released")
            return [Send(Failed.of(error, message.request_id, message.epoch))]
        return self._go_on(reservation.but(start=message), now)

    def release(self, message: Release) -> list[ReservationEffect]:
        """The gateway ends an attempt. Nothing if no sequence waits for it here."""
        reservation = self._find(message.request_id, message.epoch)
        return [] if reservation is None else self._end(reservation, "released")

    def tick(self, now: float) -> list[ReservationEffect]:
        """Time has passed."""
        late = [reservation for reservation in self._reservations.values() if reservation.deadline <= now]
        return [effect for reservation in late for effect in self._give_up(reservation)]

    def deadline(self) -> float | None:
        """When `tick` has something to do next, if nothing else happens."""
        waiting = (reservation.deadline for reservation in self._reservations.values() if not reservation.stopping)
        return min(waiting, default=None)

    def closed(self) -> list[ReservationEffect]:
        """The gateway is gone, and with it all who could want the sequences."""
        reservations = [reservation for reservation in self._reservations.values() if reservation.over is None]
        return [effect for reservation in reservations for effect in self._end(reservation, "closed")]

    def _find(self, request_id: str, epoch: int) -> Reservation | None:
        """The reservation of an attempt, if it has not ended."""
        for reservation in self._reservations.values():
            if reservation.attempt == (request_id, epoch) and reservation.over is None:
                return reservation
        return None

    def _give_up(self, reservation: Reservation) -> list[ReservationEffect]:
        """Nothing has happened for too long. A read that hangs is given up, and then the wait goes on without it."""
        if reservation.reading is not None:
            return self._stop_reading(reservation)
        message = f"no frames of the prompt have come for {reservation.reserve.expiry:g} s: it is tried in another way"
        error = Unavailable(message, code=WAITED_TOO_LONG)
        return [Send(Failed.of(error, *reservation.attempt)), *self._end(reservation, "expired")]

    def _end(self, reservation: Reservation, why: End) -> list[ReservationEffect]:
        """No longer wait. Frames that a connector may still write to are freed when it has ended."""
        if reservation.reading is None:
            return self._drop(reservation, why)
        return self._stop_reading(reservation.but(over=why, queue=()))

    def _stop_reading(self, reservation: Reservation) -> list[ReservationEffect]:
        self._reservations[reservation.nonce] = reservation.but(stopping=True)
        return [] if reservation.stopping else [StopReading(reservation.nonce)]

    def _drop(self, reservation: Reservation, why: End) -> list[ReservationEffect]:
        del self._reservations[reservation.nonce]
        return [Drop(reservation.nonce, why, reservation.have)]

    def _go_on(self, reservation: Reservation, now: float) -> list[ReservationEffect]:
        """Something has happened: read what is next, and when nothing is, see what becomes of the sequence."""
        effects: list[ReservationEffect] = []
        reservation = reservation.but(deadline=now + reservation.reserve.expiry)
        if reservation.reading is None and reservation.queue:
            (ticket, until), *later = reservation.queue
            if until <= now:
                effects.append(Refuse("expired"))
                reservation = reservation.but(refused="expired", queue=())
            else:
                effects.append(Read(reservation.nonce, ticket))
                reservation = reservation.but(reading=ticket, queue=tuple(later))
        self._reservations[reservation.nonce] = reservation
        if reservation.reading is not None:
            return effects
        if (why := reservation.refused) is not None and not reservation.told:
            reservation = self._reservations[reservation.nonce] = reservation.but(told=True)
            effects.append(Send(Refused(*reservation.attempt, reservation.nonce, why)))
        if reservation.start is not None:
            effects.append(self._run(reservation, reservation.start))
        return effects

    def _run(self, reservation: Reservation, start: Start) -> Run:
        del self._reservations[reservation.nonce]
        tokens = len(tokens_of(reservation.reserve.generate)) + len(start.tokens)
        return Run(reservation.nonce, *reservation.attempt, min(reservation.have, tokens - 1), start.tokens)
