"""The decode worker's side, event by event."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from handover_samples import NONCE, PROMPT, RELEASE, TARGET, generate, ready, reserve, start, taken, ticket

from tokenmill.core.errors import Unavailable
from tokenmill.core.handover import WAITED_TOO_LONG, Ready, Refusal, Refused, Release, Reserve, Reserved, Start, Ticket, token_hash
from tokenmill.core.messages import Failed
from tokenmill.worker.handover.effects import Drop, Open, Read, Refuse, Run, Send, StopReading
from tokenmill.worker.handover.reservation import Outcome, Reservation, Reservations, verify


def opened(have: int = 0) -> Reservations:
    """A reservation, made at time 0."""
    reservations = Reservations(TARGET)
    assert reservations.reserve(reserve(), NONCE, 0.0) == [Open(reserve(), NONCE)]
    assert reservations.opened(NONCE, have) == [Send(Reserved("r", 1, NONCE, have))]
    return reservations


def reading() -> Reservations:
    """The first chunk is being read."""
    reservations = opened()
    assert reservations.ready(ready(0), 0.0) == [Read(NONCE, ticket(0))]
    return reservations


def told(reason: Refusal) -> Send:
    return Send(Refused("r", 1, NONCE, reason))


def test_chunks_are_read_one_by_one_and_then_the_sequence_runs() -> None:
    reservations = reading()
    assert reservations.ready(ready(1), 1.0) == []
    assert reservations.start(start(7), 2.0) == []
    assert reservations.read_ended(NONCE, "ok", 3.0) == [Send(taken(0)), Read(NONCE, ticket(1))]
    assert reservations.read_ended(NONCE, "ok", 4.0) == [Send(taken(1)), Run(NONCE, "r", 1, 16, (7,))]
    assert len(reservations) == 0


def test_tickets_queue_behind_one_another() -> None:
    prompt = list(range(100, 128))
    reservations = Reservations(TARGET)
    reservations.reserve(Reserve(generate(prompt=prompt), 10.0), NONCE, 0.0)
    reservations.opened(NONCE, 0)
    tickets = [msgspec.structs.replace(ticket(n), last=n == 2, token_hash=token_hash(prompt[: 8 * n + 8])) for n in range(3)]
    assert reservations.ready(Ready(tickets[0]), 0.0) == [Read(NONCE, tickets[0])]
    assert [reservations.ready(Ready(queued), 0.0) for queued in tickets[1:]] == [[], []]
    assert reservations.read_ended(NONCE, "ok", 0.0) == [Send(taken(0)), Read(NONCE, tickets[1])]
    assert reservations.read_ended(NONCE, "ok", 0.0) == [Send(taken(1)), Read(NONCE, tickets[2])]


def test_a_sequence_whose_frames_are_all_here_waits_for_its_start() -> None:
    reservations = reading()
    reservations.ready(ready(1), 0.0)
    reservations.read_ended(NONCE, "ok", 0.0)
    assert reservations.read_ended(NONCE, "ok", 0.0) == [Send(taken(1))]
    assert reservations.start(start(7), 0.0) == [Run(NONCE, "r", 1, 16, (7,))]


def test_without_tickets_all_is_computed() -> None:
    assert opened().start(start(), 0.0) == [Run(NONCE, "r", 1, 0, ())]


def test_the_last_token_is_computed_even_if_its_frame_has_come() -> None:
    reservations = Reservations(TARGET)
    reservations.reserve(Reserve(generate(prompt=PROMPT[:16]), 10.0), NONCE, 0.0)
    reservations.opened(NONCE, 0)
    whole = msgspec.structs.replace(ticket(0), stop=16, frames=((1, 2), (3,)), last=True, token_hash=token_hash(PROMPT[:16]))
    assert reservations.ready(Ready(whole), 0.0) == [Read(NONCE, whole)]
    reservations.read_ended(NONCE, "ok", 0.0)
    assert reservations.start(start(), 0.0) == [Run(NONCE, "r", 1, 15, ())]


def test_chunks_go_on_from_what_the_prefix_tree_had() -> None:
    first = msgspec.structs.replace(ticket(1), chunk=0)
    assert opened(have=8).ready(Ready(first), 0.0) == [Read(NONCE, first)]


@pytest.mark.parametrize("outcome", ["refused", "lost", "corrupt", "displaced"])
def test_after_a_read_that_fails_nothing_more_is_read_and_the_rest_computed(outcome: Outcome) -> None:
    reservations = reading()
    reservations.ready(ready(1), 0.0)
    assert outcome != "ok"
    assert reservations.read_ended(NONCE, outcome, 0.0) == [Refuse(outcome), told(outcome)]
    assert reservations.ready(ready(1), 0.0) == []
    assert reservations.start(start(7), 0.0) == [Run(NONCE, "r", 1, 0, (7,))]


def test_a_chunk_after_a_good_one_that_fails_leaves_the_good_one() -> None:
    reservations = reading()
    reservations.ready(ready(1), 0.0)
    reservations.read_ended(NONCE, "ok", 0.0)
    reservations.start(start(7), 0.0)
    assert reservations.read_ended(NONCE, "corrupt", 0.0) == [Refuse("corrupt"), told("corrupt"), Run(NONCE, "r", 1, 8, (7,))]


def test_a_wrong_ticket_is_refused_but_those_before_it_are_read() -> None:
    reservations = reading()
    wrong = Ready(msgspec.structs.replace(ticket(1), tenant="another"))
    assert reservations.ready(wrong, 0.0) == [Refuse("tenant")]
    assert reservations.start(start(7), 0.0) == []
    assert reservations.read_ended(NONCE, "ok", 0.0) == [Send(taken(0)), told("tenant"), Run(NONCE, "r", 1, 8, (7,))]


def test_a_ticket_for_nobody_is_refused() -> None:
    assert opened().ready(Ready(ticket(0, nonce=b"of yesterday....")), 0.0) == [Refuse("nonce")]


def test_a_ticket_that_has_waited_too_long_is_not_read() -> None:
    reservations = reading()
    reservations.ready(ready(1), 1.0)
    assert reservations.read_ended(NONCE, "ok", 11.0) == [Send(taken(0)), Refuse("expired"), told("expired")]


Change = dict[str, object]

WRONG: list[tuple[Refusal, Change]] = [
    ("nonce", {"nonce": b"fedcba9876543210"}),
    ("request", {"request_id": "another"}),
    ("epoch", {"epoch": 2}),
    ("decode_boot", {"decode_boot": "boot before"}),
    ("prefill_boot", {"prefill_boot": ""}),
    ("fingerprint", {"fingerprint": "another model"}),
    ("tenant", {"tenant": ""}),
    ("chunk", {"chunk": 1}),
    ("range", {"start": 8, "stop": 16, "last": True}),
    ("range", {"start": -8}),
    ("range", {"stop": 0}),
    ("range", {"stop": -8}),
    ("range", {"stop": 7}),
    ("range", {"stop": 24, "last": True}),
    ("range", {"last": True}),
    ("range", {"stop": 16, "frames": ((10, 11), (21,))}),
    ("frames", {"frames": ((10,),)}),
    ("frames", {"frames": ((10,), (20,), (30,))}),
    ("frames", {"frames": ((10, 11), (20,))}),
    ("frames", {"frames": ((), (20,))}),
    ("frames", {"frames": ((-1,), (20,))}),
    ("frames", {"frames": ((10,), (10,))}),
    ("tokens", {"token_hash": token_hash([*PROMPT[:7], 0])}),
    ("tokens", {"token_hash": b""}),
    ("expired", {"expiry": 0.0}),
]


@pytest.mark.parametrize(("reason", "change"), WRONG, ids=[f"{reason} {change}" for reason, change in WRONG])
def test_a_ticket_is_right_in_every_field_or_refused(reason: Refusal, change: Change) -> None:
    reservation = Reservation(reserve(), NONCE, 16, 10.0)
    assert verify(ticket(0), reservation, TARGET) is None
    assert verify(msgspec.structs.replace(ticket(0), **change), reservation, TARGET) == reason


def test_every_field_of_a_ticket_is_checked_or_is_the_connectors() -> None:
    changed = {field for _, change in WRONG for field in change}
    assert {field.name for field in msgspec.structs.fields(Ticket)} - changed == {"address", "checksum"}


def test_all_tickets_of_a_reservation_come_from_one_process() -> None:
    reservations = reading()
    other = Ready(msgspec.structs.replace(ticket(1), prefill_boot="boot of p, later"))
    assert reservations.ready(other, 0.0) == [Refuse("prefill_boot")]


def test_a_group_with_a_window_brings_what_the_next_row_sees() -> None:
    reservation = Reservation(reserve(), NONCE, 16, 10.0)
    both = msgspec.structs.replace(ticket(0), stop=16, frames=((10, 11), (21,)), last=True, token_hash=token_hash(PROMPT[:16]))
    assert verify(both, reservation, TARGET) is None
    assert verify(msgspec.structs.replace(both, frames=((10, 11), (20, 21))), reservation, TARGET) == "frames"
    assert verify(both, reservation, TARGET._replace(windows=(None, 10))) == "frames"


def test_a_release_frees_the_frames() -> None:
    reservations = opened(have=8)
    assert reservations.release(Release("r", 2)) == []
    assert reservations.release(RELEASE) == [Drop(NONCE, "released", 8)]
    assert reservations.release(RELEASE) == []


@pytest.mark.parametrize("outcome", ["ok", "lost"])
def test_frames_that_a_connector_may_write_to_are_freed_when_it_has_ended(outcome: Outcome) -> None:
    reservations = reading()
    assert reservations.release(RELEASE) == [StopReading(NONCE)]
    assert reservations.release(RELEASE) == []
    assert reservations.ready(ready(1), 0.0) == [Refuse("nonce")]
    assert reservations.read_ended(NONCE, outcome, 0.0) == [Drop(NONCE, "released", 8 if outcome == "ok" else 0)]
    assert len(reservations) == 0


def test_reservations_end_with_the_gateway() -> None:
    reservations = reading()
    reservations.reserve(reserve(epoch=2), b"another", 0.0)
    reservations.opened(b"another", 0)
    assert reservations.closed() == [StopReading(NONCE), Drop(b"another", "closed", 0)]
    assert reservations.closed() == []
    assert reservations.read_ended(NONCE, "lost", 0.0) == [Drop(NONCE, "closed", 0)]


def test_what_hears_nothing_is_given_up() -> None:
    reservations = opened()
    assert reservations.deadline() == 10.0
    assert reservations.tick(9.9) == []
    sent, dropped = reservations.tick(10.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Failed)
    assert (sent.message.epoch, sent.message.status, sent.message.code) == (1, 503, WAITED_TOO_LONG)
    assert dropped == Drop(NONCE, "expired", 0)
    assert reservations.deadline() is None


def test_every_ticket_is_news() -> None:
    reservations = opened()
    reservations.ready(ready(0), 8.0)
    assert reservations.deadline() == 18.0
    reservations.read_ended(NONCE, "ok", 9.0)
    assert reservations.deadline() == 19.0


def test_a_read_that_hangs_is_stopped_and_the_rest_computed() -> None:
    reservations = reading()
    reservations.start(start(7), 1.0)
    assert reservations.tick(11.0) == [StopReading(NONCE)]
    assert reservations.deadline() is None
    assert reservations.tick(99.0) == []
    assert reservations.read_ended(NONCE, "lost", 100.0) == [Refuse("lost"), told("lost"), Run(NONCE, "r", 1, 0, (7,))]


def test_a_read_that_hangs_does_not_cost_the_reservation() -> None:
    reservations = reading()
    assert reservations.tick(10.0) == [StopReading(NONCE)]
    assert reservations.read_ended(NONCE, "lost", 12.0) == [Refuse("lost"), told("lost")]
    assert reservations.deadline() == 22.0
    assert reservations.start(start(7), 13.0) == [Run(NONCE, "r", 1, 0, (7,))]


def test_a_start_for_what_is_not_here_is_answered() -> None:
    def refused(do: Callable[[Reservations], object], epoch: int = 1) -> bool:
        reservations = reading()
        do(reservations)
        (sent,) = reservations.start(Start("r", epoch, (7,)), 0.0)
        return isinstance(sent, Send) and isinstance(sent.message, Failed) and sent.message.epoch == epoch

    assert refused(lambda reservations: None, epoch=2)
    assert refused(lambda reservations: reservations.release(RELEASE))
    assert refused(lambda reservations: (reservations.start(start(7), 0.0), reservations.read_ended(NONCE, "ok", 0.0)))


def test_an_attempt_has_one_reservation() -> None:
    reservations = opened()
    (sent,) = reservations.reserve(reserve(), b"another", 0.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Failed)
    assert len(reservations) == 1


def test_another_attempt_can_be_reserved_while_a_read_of_the_last_one_ends() -> None:
    reservations = reading()
    reservations.release(RELEASE)
    assert reservations.reserve(reserve(), b"another", 0.0) == [Open(reserve(), b"another")]


def test_a_sequence_that_the_engine_does_not_take_leaves_nothing() -> None:
    reservations = Reservations(TARGET)
    reservations.reserve(reserve(), NONCE, 0.0)
    error = Unavailable("no room")
    assert reservations.rejected(NONCE, error) == [Send(Failed.of(error, "r", 1))]
    assert len(reservations) == 0
