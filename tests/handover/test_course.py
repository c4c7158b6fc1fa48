"""The gateway's side, event by event."""

from __future__ import annotations

import msgspec
import pytest
from handover_samples import NONCE, PROMPT, generate, ready, taken, ticket

from tokenmill.cluster.course import Course, CoursePolicy, Deliver, Effect, Fail, NeedDecode, NeedPrefill, Process, Send
from tokenmill.core.errors import EngineDied, InvalidRequest, KernelError, TokenmillError, Unavailable
from tokenmill.core.handover import WAITED_TOO_LONG, Prefill, Ready, Refused, Release, Reserve, Reserved, Start
from tokenmill.core.messages import Abort, Failed, Generate, SequenceOutput
from tokenmill.core.types import FinishReason

P, P2, D, D2 = Process("p", "boot of p"), Process("p2", "boot of p2"), Process("d", "boot of d"), Process("d2", "boot of d2")
POLICY = CoursePolicy(reservation_expiry=10.0, lease_expiry=10.0)
ONE_TRY = msgspec.structs.replace(POLICY, prefills=1)
ONE_LOSS = msgspec.structs.replace(POLICY, prefills=9, losses=1)
NONE: frozenset[str] = frozenset()
BUSY = Unavailable("busy")


def out(index: int, *tokens: int, epoch: int = 1, choice: int = 0, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput("r", choice, list(tokens), finish_reason=finish, epoch=epoch, index=index)


def failed(error: TokenmillError = BUSY, epoch: int = 1) -> Failed:
    return Failed.of(error, "r", epoch)


def release(epoch: int = 1) -> Release:
    return Release("r", epoch)


def chosen(policy: CoursePolicy = POLICY) -> Course:
    """D has been asked for a reservation."""
    course = Course(generate(epoch=0), separate=True, policy=policy)
    assert course.begin() == [NeedDecode(NONE, True)]
    assert course.decode_worker(D) == [Send(D, Reserve(generate(), 10.0))]
    return course


def reserved(policy: CoursePolicy = POLICY) -> Course:
    course = chosen(policy)
    assert course.heard(D, Reserved("r", 1, NONCE, 8)) == [NeedPrefill(frozenset("d"), D, 8)]
    return course


def prefilling(policy: CoursePolicy = POLICY) -> Course:
    course = reserved(policy)
    assert course.prefill_worker(P) == [Send(P, Prefill(generate(), NONCE, D.boot, 8, 10.0))]
    return course


def decoding() -> Course:
    """Both chunks are on the way, and the first token is told."""
    course = prefilling()
    for number in (0, 1):
        assert course.heard(P, ready(number)) == [Send(D, ready(number))]
    assert course.heard(P, out(0, 7)) == [Deliver(out(0, 7)), Send(D, Start("r", 1, (7,)))]
    return course


def whole(choices: int = 1) -> Course:
    course = Course(generate(epoch=0, n=choices), separate=False, policy=POLICY)
    assert course.begin() == [NeedDecode(NONE, False)]
    assert course.decode_worker(D) == [Send(D, generate(n=choices))]
    return course


def test_a_request_goes_from_the_prefill_to_the_decode_worker() -> None:
    course = decoding()
    assert course.heard(D, taken(0)) == [Send(P, taken(0))]
    assert course.heard(D, taken(1)) == [Send(P, taken(1))]
    assert course.heard(D, out(1, 8, 9)) == [Deliver(out(1, 8, 9))]
    last = out(3, 10, 11, finish=FinishReason.LENGTH)
    assert course.heard(D, last) == [Deliver(last)], "nobody has anything left to be released"
    assert course.over


def test_a_token_that_ends_the_request_releases_both() -> None:
    last = out(0, 7, finish=FinishReason.STOP)
    assert prefilling().heard(P, last) == [Deliver(last), Send(D, release()), Send(P, release())]


def test_a_prefill_worker_that_may_have_frames_is_released_at_the_end() -> None:
    last = out(1, 8, finish=FinishReason.STOP)
    assert decoding().heard(D, last) == [Deliver(last), Send(P, release())]
    course = decoding()
    refused = Refused("r", 1, NONCE, "corrupt")
    assert course.heard(D, refused) == [Send(P, refused)]
    assert course.heard(D, last) == [Deliver(last)], "it frees them by itself"


def test_a_refusal_before_the_token_does_not_end_the_prefill() -> None:
    course = prefilling()
    refused = Refused("r", 1, NONCE, "corrupt")
    assert course.heard(D, refused) == [Send(P, refused)]
    assert course.heard(P, out(0, 7)) == [Deliver(out(0, 7)), Send(D, Start("r", 1, (7,)))]
    last = out(1, 8, finish=FinishReason.STOP)
    assert course.heard(D, last) == [Deliver(last)], "with the token its frames have gone"


def test_a_prompt_that_the_decode_worker_has_is_not_prefilled() -> None:
    assert chosen().heard(D, Reserved("r", 1, NONCE, 16)) == [Send(D, Start("r", 1))]


def test_without_a_prefill_worker_the_decode_worker_computes_all() -> None:
    course = reserved()
    assert course.prefill_worker(None) == [Send(D, Start("r", 1))]
    assert course.heard(D, out(0, 7)) == [Deliver(out(0, 7))]


def test_without_a_decode_worker_the_request_fails() -> None:
    course = Course(generate(epoch=0), separate=True)
    course.begin()
    error = Unavailable("all are draining")
    assert course.decode_worker(error) == [Fail(error)]
    assert course.over
    assert course.abort() == [], "it has ended once"


@pytest.mark.parametrize(
    "stale",
    [out(0, 7, epoch=0), out(0, 7, epoch=2), failed(epoch=2), Reserved("r", 2, NONCE, 0), Refused("r", 2, NONCE, "lost")],
    ids=lambda message: type(message).__name__,
)
def test_other_epochs_are_not_listened_to(stale: SequenceOutput | Failed | Reserved | Refused) -> None:
    for course in (chosen(), prefilling(), decoding(), whole()):
        for sender in (P, D):
            assert course.heard(sender, stale) == []


def test_only_the_worker_that_has_the_request_is_listened_to() -> None:
    for course, speaker, index in ((chosen(), None, 0), (reserved(), None, 0), (prefilling(), P, 0), (decoding(), D, 1), (whole(), D, 0)):
        for sender in (P, P2, D, D2, Process("d", "boot of d, later")):
            if sender != speaker:
                assert course.heard(sender, out(index, 7)) == []
        if speaker is not None:
            assert course.heard(speaker, out(index, 7))[0] == Deliver(out(index, 7))


@pytest.mark.parametrize("change", [{"nonce": b"another"}, {"prefill_boot": "p, later"}, {"decode_boot": "d, before"}, {"epoch": 2}])
def test_tickets_of_another_hand_over_are_not_passed_on(change: dict[str, object]) -> None:
    assert prefilling().heard(P, Ready(msgspec.structs.replace(ticket(0), **change))) == []


def test_tickets_are_passed_on_from_their_worker_alone_and_not_after_its_token() -> None:
    assert prefilling().heard(P2, ready(0)) == []
    course = prefilling()
    course.heard(P, out(0, 7))
    assert course.heard(P, ready(0)) == []


def test_a_failure_is_heard_from_the_prefill_worker_alone_and_not_after_its_token() -> None:
    assert prefilling().heard(P2, failed()) == []
    assert decoding().heard(P, failed()) == []


def test_what_is_said_under_another_nonce_is_not_passed_back() -> None:
    assert decoding().heard(D, msgspec.structs.replace(taken(0), nonce=b"another")) == []


def test_tokens_told_twice_are_delivered_once() -> None:
    course = decoding()
    assert course.heard(D, out(0, 7)) == []
    assert course.heard(D, out(1, 8, 9)) == [Deliver(out(1, 8, 9))]
    assert course.heard(D, out(1, 8, 9)) == []
    assert course.heard(D, out(2, 9)) == []


@pytest.mark.parametrize("odd", [out(2, 9), out(0, 7, 8)], ids=["gap", "overlap"])
def test_tokens_out_of_order_make_another_attempt(odd: SequenceOutput) -> None:
    course = decoding()
    assert course.heard(D, odd) == [Send(D, release()), Send(P, release()), NeedDecode(frozenset("d"), True)]
    assert course.decode_worker(D2) == [Send(D2, Reserve(generate(2, output=[7]), 10.0))]


def test_a_decode_worker_that_refuses_is_not_asked_again() -> None:
    course = chosen()
    assert course.heard(D, failed()) == [NeedDecode(frozenset("d"), True)]
    assert course.decode_worker(D2) == [Send(D2, Reserve(generate(2), 10.0))]
    (effect,) = course.heard(D2, failed(Unavailable("full"), epoch=2))
    assert effect == NeedDecode(frozenset({"d", "d2"}), True)
    (effect,) = course.decode_worker(Unavailable("none is left"))
    assert isinstance(effect, Fail)
    assert effect.error.message == "full", "what a worker said tells more than that there is no other"


def test_what_no_worker_would_take_is_not_sent_to_others() -> None:
    course = whole()
    (effect,) = course.heard(D, failed(InvalidRequest("too long")))
    assert isinstance(effect, Fail)
    assert (effect.error.status, effect.error.message) == (400, "too long")


def test_what_a_broken_worker_does_not_take_is_sent_to_another() -> None:
    assert whole().heard(D, failed(KernelError("broken"))) == [NeedDecode(frozenset("d"), False)]


def test_a_decode_worker_that_refuses_after_the_prefill_is_replaced() -> None:
    course = decoding()
    assert course.heard(D, failed()) == [Send(P, release()), NeedDecode(frozenset("d"), True)]
    assert course.decode_worker(D2) == [Send(D2, Reserve(generate(2, output=[7]), 10.0))]
    assert course.heard(D2, Reserved("r", 2, NONCE, 0)) == [NeedPrefill(frozenset({"d2"}), D2, 0)]
    course.prefill_worker(P)
    assert course.heard(P, out(1, 8, epoch=2)) == [Deliver(out(1, 8, epoch=2)), Send(D2, Start("r", 2, (8,)))]


def test_a_prefill_worker_that_refuses_is_replaced_in_a_new_attempt() -> None:
    course = prefilling()
    assert course.heard(P, failed(InvalidRequest("no room for it, ever"))) == [Send(D, release()), Send(D, Reserve(generate(2), 10.0))]
    assert course.heard(D, Reserved("r", 2, NONCE, 0)) == [NeedPrefill(frozenset({"d", "p"}), D, 0)]
    course.prefill_worker(P2)
    assert course.heard(P2, failed(epoch=2)) == [Send(D, Start("r", 2))], "two have failed"
    last = out(0, 7, epoch=2, finish=FinishReason.STOP)
    assert course.heard(D, last) == [Deliver(last)], "neither of them has anything left"


def test_a_prefill_worker_that_dies_after_its_last_ticket_is_not_replaced() -> None:
    course = prefilling()
    course.heard(P, ready(1))
    assert course.lost(P) == [Send(D, Start("r", 1))]


def test_a_prefill_worker_that_dies_after_its_token_does_not_matter() -> None:
    course = decoding()
    assert course.lost(P) == []
    last = out(1, 8, finish=FinishReason.STOP)
    assert course.heard(D, last) == [Deliver(last)]


def test_a_decode_worker_that_waited_too_long_is_no_worse_for_it() -> None:
    course = prefilling(ONE_TRY)
    late = failed(Unavailable("late", code=WAITED_TOO_LONG))
    assert course.heard(D, late) == [Send(P, release()), NeedDecode(NONE, False)]
    assert course.decode_worker(D) == [Send(D, generate(2))]


def test_a_lost_decode_worker_costs_nothing_that_was_told() -> None:
    course = decoding()
    course.heard(D, out(1, 8))
    assert course.lost(D) == [Send(P, release()), NeedDecode(NONE, True)]
    assert course.decode_worker(D2) == [Send(D2, Reserve(generate(2, output=[7, 8]), 10.0))]
    assert course.heard(D, out(2, 9)) == []


def test_the_same_worker_may_have_the_request_again_when_it_has_been_restarted() -> None:
    course = decoding()
    course.lost(D)
    again = Process("d", "boot of d, later")
    (effect,) = course.decode_worker(again)
    assert effect == Send(again, Reserve(generate(2, output=[7]), 10.0))
    assert course.lost(D) == [], "its end is known"


def test_a_hung_worker_is_told_to_let_go_and_not_asked_again() -> None:
    course = prefilling()
    assert course.hung(P) == [Send(P, release()), Send(D, release()), Send(D, Reserve(generate(2), 10.0))]
    assert course.heard(D, Reserved("r", 2, NONCE, 0)) == [NeedPrefill(frozenset({"d", "p"}), D, 0)]
    assert decoding().hung(D) == [Send(D, release()), Send(P, release()), NeedDecode(frozenset("d"), True)]
    assert decoding().hung(P) == [], "its frames may yet be read"
    assert decoding().hung(P2) == []


def test_losses_between_which_tokens_came_are_not_added_up() -> None:
    course = Course(generate(epoch=0), separate=False, policy=CoursePolicy(losses=1, progress=2))
    course.begin()
    for start in range(5):
        process = Process("d", f"start {start}")
        course.decode_worker(process)
        for index in (2 * start, 2 * start + 1):
            course.heard(process, out(index, 7, epoch=start + 1))
        assert course.lost(process) == [NeedDecode(NONE, False)]
    process = Process("d", "the last")
    course.decode_worker(process)
    course.heard(process, out(10, 7, epoch=6))
    assert isinstance(course.lost(process)[-1], Fail)


def test_a_worker_that_is_left_gives_its_frames_to_the_next() -> None:
    course = decoding()
    course.heard(D, out(1, 8))
    assert course.leave(D, gives=True) == [Send(D, release()), Send(P, release()), NeedDecode(frozenset("d"), True)]
    assert course.heard(D, out(2, 9)) == [], "it is not listened to any more"
    assert course.decode_worker(D2) == [Send(D2, Reserve(generate(2, output=[7, 8]), 10.0))]
    needed = course.heard(D2, Reserved("r", 2, NONCE, 0))
    assert needed == [NeedPrefill(frozenset({D2.name}), D2, 0, D)]
    assert isinstance(course.prefill_worker(D)[0].message, Prefill)  # type: ignore[union-attr]
    assert course.leave(P2, gives=True) == []


def test_a_worker_that_is_left_and_gives_nothing_is_only_left() -> None:
    course = whole()
    course.heard(D, out(0, 7))
    assert course.leave(D, gives=False) == [Send(D, release()), NeedDecode(frozenset("d"), False)]
    assert course.decode_worker(D2) == [Send(D2, generate(2, output=[7]))]


def test_a_request_that_outlives_too_many_workers_fails() -> None:
    course = Course(generate(epoch=0), separate=False, policy=CoursePolicy(losses=2))
    course.begin()
    for start in range(3):
        process = Process("d", f"start {start}")
        course.decode_worker(process)
        effects = course.lost(process)
    (effect,) = effects
    assert isinstance(effect, Fail)
    assert isinstance(effect.error, EngineDied)
    assert "3 workers ended" in effect.error.message


def test_a_prompt_that_kills_prefill_workers_does_not_go_on_to_kill_all_others() -> None:
    course = prefilling(ONE_LOSS)
    course.lost(P)
    course.heard(D, Reserved("r", 2, NONCE, 0))
    course.prefill_worker(P2)
    released, effect = course.lost(P2)
    assert released == Send(D, release(2))
    assert isinstance(effect, Fail)


def end(choice: int = 0, index: int = 0, epoch: int = 1) -> Deliver:
    return Deliver(out(index, choice=choice, epoch=epoch, finish=FinishReason.ABORT))


@pytest.mark.parametrize(
    ("course", "effects"),
    [
        (chosen(), [end(), Send(D, release())]),
        (reserved(), [end(), Send(D, release())]),
        (prefilling(), [end(), Send(D, release()), Send(P, release())]),
        (decoding(), [end(index=1), Send(D, release()), Send(P, release())]),
        (whole(), [end(), Send(D, release())]),
    ],
    ids=["reserving", "pairing", "prefilling", "decoding", "whole"],
)
def test_a_client_that_leaves_ends_everything(course: Course, effects: list[Effect]) -> None:
    assert course.abort() == effects
    assert course.over
    assert course.abort() == []
    assert course.lost(D) == []
    assert course.hung(D) == []
    assert course.heard(D, Reserved("r", 1, NONCE, 0)) == []
    assert course.heard(D, out(1, 7)) == []
    assert course.decode_worker(D2) == []
    assert course.prefill_worker(P) == []


def test_a_client_that_leaves_before_there_is_a_worker_needs_none() -> None:
    course = Course(generate(epoch=0), separate=True)
    course.begin()
    assert course.abort() == [end(epoch=0)]
    assert course.decode_worker(D) == []


def test_choices_end_one_by_one() -> None:
    course = whole(choices=3)
    first = out(0, 7, choice=1, finish=FinishReason.STOP)
    assert course.heard(D, first) == [Deliver(first)]
    stopped = Deliver(out(0, choice=0, finish=FinishReason.STOP))
    assert course.abort(0, FinishReason.STOP) == [stopped, Send(D, Abort("r", 0, FinishReason.STOP))]
    assert course.heard(D, out(0, 5, choice=0)) == [], "it has had its last"
    assert course.abort(0) == []
    assert not course.over
    last = out(0, 7, choice=2, finish=FinishReason.LENGTH)
    assert course.heard(D, last) == [Deliver(last)]
    assert course.over


def test_choices_that_have_ended_are_not_started_again() -> None:
    course = whole(choices=3)
    course.heard(D, out(0, 7, choice=1, finish=FinishReason.STOP))
    course.heard(D, out(0, 5, 6, choice=2))
    assert course.lost(D) == [NeedDecode(NONE, False)]
    (effect,) = course.decode_worker(D2)
    assert effect == Send(D2, msgspec.structs.replace(generate(2, n=3), output={0: [], 2: [5, 6]}))
    assert course.heard(D2, out(2, 9, choice=2, epoch=2)) == [Deliver(out(2, 9, choice=2, epoch=2))]


def test_a_choice_that_is_stopped_between_two_attempts_is_not_started() -> None:
    course = Course(generate(epoch=0, n=2), separate=False)
    course.begin()
    assert course.abort(1) == [end(choice=1, epoch=0)]
    (effect,) = course.decode_worker(D)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Generate)
    assert effect.message.output == {0: []}


def test_an_attempt_is_not_changed_by_what_is_told_later() -> None:
    course = decoding()
    course.lost(D)
    (effect,) = course.decode_worker(D2)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Reserve)
    course.heard(D2, Reserved("r", 2, NONCE, 16))
    course.heard(D2, out(1, 8, epoch=2))
    assert effect.message.generate.output == {0: [7]}
    assert effect.message.generate.prompt == PROMPT
