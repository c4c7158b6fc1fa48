"""Faults put into the machines: for each there is a world in which the exploration finds it, and says how it comes to light."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from exploring import Broken, explore
from handover_parts import Request, Scenario

from tokenmill.cluster.course import Course, Effect, Process
from tokenmill.core.handover import Ready, Start, Taken
from tokenmill.core.messages import SequenceOutput
from tokenmill.worker.handover import reservation as reservation_module
from tokenmill.worker.handover.effects import Drop, LeaseEffect, Read, ReservationEffect, Send
from tokenmill.worker.handover.lease import Lease, Leases
from tokenmill.worker.handover.reservation import Outcome, Queued, Reservation, Reservations, verify

Patch = Callable[[pytest.MonkeyPatch], None]

ONE = Scenario((Request("a", 1),))
PAIR = Scenario((Request("a", 1),), prefill=1, decode=1)
LONGER = Scenario((Request("a", 1, max_tokens=3),), prefill=1, decode=1)
WHOLE_FRAMES = Scenario((Request("a", 1, length=16),), prefill=1, decode=1)
SHORT = Scenario((Request("a", 1, max_tokens=1),))
CHOICES = Scenario((Request("a", 1, choices=2, separate=False),), prefill=0)


def skipping(*reasons: str) -> Callable[..., Any]:
    def generous(ticket: Any, reservation: Reservation, target: Any) -> Any:
        wrong = verify(ticket, reservation, target)
        return None if wrong in reasons else wrong

    return generous


def take_a_ticket_without_looking_at_its_nonce(patch: pytest.MonkeyPatch) -> None:
    def ready(machine: Reservations, message: Ready, now: float) -> list[ReservationEffect]:
        ticket = message.ticket
        reservation = machine._find(ticket.request_id, ticket.epoch)
        if reservation is None or reservation.refused is not None:
            return []
        wrong = verify(msgspec.structs.replace(ticket, nonce=reservation.nonce), reservation, machine._target)
        if wrong is not None:
            return machine._go_on(reservation.but(refused=wrong), now)
        queue = (*reservation.queue, Queued(ticket, now + ticket.expiry))
        return machine._go_on(reservation.but(queue=queue, chunks=ticket.chunk + 1, source=ticket.prefill_boot), now)

    patch.setattr(Reservations, "ready", ready)


def listen_to_any_epoch(patch: pytest.MonkeyPatch) -> None:
    heard = Course.heard

    def hearing(course: Course, sender: Process, message: Any) -> list[Effect]:
        if not isinstance(message, Ready):
            message = msgspec.structs.replace(message, epoch=course._epoch)
        return heard(course, sender, message)

    patch.setattr(Course, "heard", hearing)


def listen_to_any_worker(patch: pytest.MonkeyPatch) -> None:
    heard = Course.heard

    def hearing(course: Course, sender: Process, message: Any) -> list[Effect]:
        if isinstance(message, SequenceOutput) and course._speaker is not None:
            sender = course._speaker
        return heard(course, sender, message)

    patch.setattr(Course, "heard", hearing)


def deliver_what_was_delivered(patch: pytest.MonkeyPatch) -> None:
    take = Course._take

    def taking(course: Course, sender: Process, output: SequenceOutput) -> list[Effect]:
        given = course._open.get(output.choice)
        return take(course, sender, output if given is None else msgspec.structs.replace(output, index=len(given)))

    patch.setattr(Course, "_take", taking)


def forget_that_a_choice_has_ended(patch: pytest.MonkeyPatch) -> None:
    take = Course._take

    def taking(course: Course, sender: Process, output: SequenceOutput) -> list[Effect]:
        given = course._open.get(output.choice, [])
        effects = take(course, sender, output)
        course._open.setdefault(output.choice, given)
        return effects

    patch.setattr(Course, "_take", taking)


def keep_leases_when_the_gateway_has_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "closed", lambda machine: [])


def keep_reservations_when_the_gateway_has_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservations, "closed", lambda machine: [])


def count_what_is_taken(patch: pytest.MonkeyPatch) -> None:
    taken = Leases.taken

    def counting(machine: Leases, message: Taken, now: float) -> list[LeaseEffect]:
        lease = machine._leases.get(message.nonce)
        return [] if lease is None else taken(machine, msgspec.structs.replace(message, chunk=lease.taken), now)

    patch.setattr(Leases, "taken", counting)


def end_a_lease_with_its_first_chunk(patch: pytest.MonkeyPatch) -> None:
    def end(lease: Lease) -> str | None:
        return "taken" if lease.computed and lease.taken else None

    patch.setattr(Lease, "end", property(end))


def end_a_lease_before_its_prompt_is_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "end", property(lambda lease: "taken" if lease.tickets and lease.taken == lease.tickets else None))


def keep_what_nobody_will_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "refused", lambda machine, message: [])


def run_before_the_frames_have_come(patch: pytest.MonkeyPatch) -> None:
    def start(machine: Reservations, message: Start, now: float) -> list[ReservationEffect]:
        reservation = machine._find(message.request_id, message.epoch)
        return [] if reservation is None else [machine._run(reservation, message)]

    patch.setattr(Reservations, "start", start)


def run_with_frames_that_were_promised(patch: pytest.MonkeyPatch) -> None:
    def start(machine: Reservations, message: Start, now: float) -> list[ReservationEffect]:
        reservation = machine._find(message.request_id, message.epoch)
        return [] if reservation is None else machine._go_on(reservation.but(start=message, have=reservation.limit), now)

    patch.setattr(Reservations, "start", start)


def ending(patch: pytest.MonkeyPatch, change: Callable[[Reservations, bytes, Outcome], Outcome]) -> None:
    read_ended = Reservations.read_ended

    def changed(machine: Reservations, nonce: bytes, outcome: Outcome, now: float) -> list[ReservationEffect]:
        return read_ended(machine, nonce, change(machine, nonce, outcome), now)

    patch.setattr(Reservations, "read_ended", changed)


def believe_frames_of_a_wrong_checksum(patch: pytest.MonkeyPatch) -> None:
    ending(patch, lambda machine, nonce, outcome: "ok" if outcome == "corrupt" else outcome)


def go_on_reading_after_a_gap(patch: pytest.MonkeyPatch) -> None:
    read_ended = Reservations.read_ended

    def going_on(machine: Reservations, nonce: bytes, outcome: Outcome, now: float) -> list[ReservationEffect]:
        reservation = machine._reservations[nonce]
        if outcome == "ok" or reservation.over is not None or not reservation.queue:
            return read_ended(machine, nonce, outcome, now)
        return machine._go_on(reservation.but(reading=None), now)

    patch.setattr(Reservations, "read_ended", going_on)


def take_a_chunk_that_does_not_follow(patch: pytest.MonkeyPatch) -> None:
    """A reservation that has refused a chunk takes later ones, and does not look at where they begin."""
    patch.setattr(reservation_module, "verify", skipping("range", "chunk"))
    ready = Reservations.ready

    def forgiving(machine: Reservations, message: Ready, now: float) -> list[ReservationEffect]:
        reservation = machine._reservations.get(message.ticket.nonce)
        if reservation is not None:
            machine._reservations[reservation.nonce] = reservation.but(refused=None)
        return ready(machine, message, now)

    patch.setattr(Reservations, "ready", forgiving)


def say_that_a_chunk_is_taken_before_it_is(patch: pytest.MonkeyPatch) -> None:
    go_on = Reservations._go_on

    def hasty(machine: Reservations, reservation: Reservation, now: float) -> list[ReservationEffect]:
        effects: list[ReservationEffect] = []
        for effect in go_on(machine, reservation, now):
            effects.append(effect)
            if isinstance(effect, Read):
                effects.append(Send(Taken(*reservation.attempt, reservation.nonce, effect.ticket.chunk)))
        return effects

    patch.setattr(Reservations, "_go_on", hasty)


def free_frames_that_are_written_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservations, "_end", Reservations._drop)


def keep_frames_that_were_written_to(patch: pytest.MonkeyPatch) -> None:
    drop = Reservations._drop
    patch.setattr(Reservations, "_drop", lambda machine, r, why: [] if r.over is not None else drop(machine, r, why))


def call_all_frames_right(patch: pytest.MonkeyPatch) -> None:
    def drop(machine: Reservations, reservation: Reservation, why: Any) -> list[ReservationEffect]:
        del machine._reservations[reservation.nonce]
        return [Drop(reservation.nonce, why, reservation.limit)]

    patch.setattr(Reservations, "_drop", drop)


def wait_for_a_read_that_hangs(patch: pytest.MonkeyPatch) -> None:
    give_up = Reservations._give_up
    patch.setattr(Reservations, "_give_up", lambda machine, r: [] if r.reading is not None else give_up(machine, r))


def compute_nothing_where_all_frames_have_come(patch: pytest.MonkeyPatch) -> None:
    run = Reservations._run
    patch.setattr(Reservations, "_run", lambda machine, r, start: run(machine, r, start)._replace(computed=r.have))


def say_nothing_to_a_prefill_worker_whose_reader_died(patch: pytest.MonkeyPatch) -> None:
    def decode_lost(course: Course) -> list[Effect]:
        course._decode = course._prefill = None
        return course._give_up() or course._seek_decode()

    patch.setattr(Course, "_decode_lost", decode_lost)


def say_nothing_to_a_decode_worker_whose_request_ended_elsewhere(patch: pytest.MonkeyPatch) -> None:
    end = Course._end

    def ending_(course: Course, finished: Process | None = None) -> list[Effect]:
        return [effect for effect in end(course, finished) if finished is None or getattr(effect, "to", None) != course._decode]

    def forgetting(course: Course, finished: Process | None = None) -> list[Effect]:
        course._decode = None
        return ending_(course, finished)

    patch.setattr(Course, "_end", forgetting)


def say_nothing_to_a_worker_that_hangs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Course, "hung", Course.lost)


def ask_a_worker_that_refused_again(patch: pytest.MonkeyPatch) -> None:
    refused = Course._decode_refused

    def forgetting(course: Course, error: Any) -> list[Effect]:
        effects = refused(course, error)
        course._not_decode = frozenset()
        return effects if course.over else [*effects[:-1], *course._seek_decode()]

    patch.setattr(Course, "_decode_refused", forgetting)


def wait_for_a_prefill_worker_that_died(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Course, "_prefill_lost", lambda course: [])


def forget_what_was_put_out(patch: pytest.MonkeyPatch) -> None:
    """Of an attempt after the first; and what is told again is taken for new."""
    attempted = Course._attempted
    patch.setattr(Course, "_attempted", lambda course: msgspec.structs.replace(attempted(course), output={}))
    deliver_what_was_delivered(patch)


def use_one_epoch_for_all_attempts(patch: pytest.MonkeyPatch) -> None:
    attempt = Course._attempt

    def attempting(course: Course, decode: Process) -> list[Effect]:
        course._epoch = 0
        return attempt(course, decode)

    patch.setattr(Course, "_attempt", attempting)


def never_release_a_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "release", lambda machine, message: [])


MUTANTS: list[tuple[Patch, Scenario, str]] = [
    (take_a_ticket_without_looking_at_its_nonce, PAIR.faulty(2, "gateway", "replay"), "a ticket of another reservation is used"),
    (listen_to_any_epoch, ONE.faulty(1, "death"), "a token of epoch 1 reaches the client"),
    (listen_to_any_worker, ONE.faulty(1, "suspicion"), "p1 was told to let go, but is listened to"),
    (deliver_what_was_delivered, LONGER.faulty(1, "replay"), "gets token 1001 after (1000, 1001)"),
    (forget_that_a_choice_has_ended, CHOICES.faulty(1, "cancel"), "gets an output after its last"),
    (keep_leases_when_the_gateway_has_gone, PAIR.faulty(1, "gateway"), "p1 holds something for good"),
    (keep_reservations_when_the_gateway_has_gone, PAIR.faulty(1, "gateway"), "runs twice on d1"),
    (count_what_is_taken, PAIR.faulty(1, "replay"), "a lease ends when 8 of 16"),
    (end_a_lease_with_its_first_chunk, ONE, "a lease ends when 8 of 16"),
    (end_a_lease_before_its_prompt_is_computed, ONE, "a lease ends when 8 of 16"),
    (keep_what_nobody_will_copy, ONE.faulty(1, "read"), "p1 holds something for good"),
    (run_before_the_frames_have_come, ONE, "runs while its frames are written to"),
    (run_with_frames_that_were_promised, PAIR.faulty(1, "loss"), "frames hold"),
    (compute_nothing_where_all_frames_have_come, WHOLE_FRAMES.faulty(1, "loss"), "nothing is left to be computed"),
    (believe_frames_of_a_wrong_checksum, ONE.faulty(1, "garbage"), "b'garbage'"),
    (go_on_reading_after_a_gap, ONE.faulty(1, "read"), "frames hold"),
    (take_a_chunk_that_does_not_follow, ONE.faulty(1, "read"), "frames hold"),
    (say_that_a_chunk_is_taken_before_it_is, ONE, "a lease ends when"),
    (free_frames_that_are_written_to, ONE.faulty(1, "cancel"), "frames are freed that a connector writes to"),
    (keep_frames_that_were_written_to, ONE.faulty(1, "cancel"), "d1 holds something for good"),
    (call_all_frames_right, ONE.faulty(1, "cancel"), "frames hold"),
    (wait_for_a_read_that_hangs, ONE.faulty(1, "stuck"), "go round in circles"),
    (say_nothing_to_a_prefill_worker_whose_reader_died, ONE.faulty(1, "death"), "p1 holds something for good"),
    (say_nothing_to_a_decode_worker_whose_request_ended_elsewhere, SHORT, "d1 holds something for good"),
    (say_nothing_to_a_worker_that_hangs, ONE.faulty(1, "suspicion"), "holds something for good"),
    (ask_a_worker_that_refused_again, Scenario((Request("a", 1),), decode_frames=1), "is attempted for ever"),
    (wait_for_a_prefill_worker_that_died, ONE.faulty(1, "death"), "never ends"),
    (forget_what_was_put_out, ONE.faulty(1, "death"), "gets token 1000 after (1000,)"),
    (use_one_epoch_for_all_attempts, ONE.faulty(1, "failure"), "an epoch is used twice"),
    (never_release_a_lease, ONE.faulty(1, "cancel"), "p1 holds something for good"),
]


@pytest.mark.parametrize(("mutate", "scenario", "seen"), MUTANTS, ids=[mutate.__name__ for mutate, _, _ in MUTANTS])
def test_a_fault_is_found(mutate: Patch, scenario: Scenario, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Broken, match=re.escape(seen)):
        explore(scenario, most=50_000)
