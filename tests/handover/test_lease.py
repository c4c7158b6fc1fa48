"""The prefill worker's side, event by event."""

from __future__ import annotations

from handover_samples import NONCE, PROMPT, RELEASE, SOURCE, chunk, generate, prefill, ready, taken

from tokenmill.core.errors import Unavailable
from tokenmill.core.handover import Prefill, Refused, Release, Ticket, token_hash
from tokenmill.core.messages import Failed
from tokenmill.worker.handover.effects import Compute, Drop, Send
from tokenmill.worker.handover.lease import Chunk, Leases

REFUSED = Refused("r", 1, NONCE, "corrupt")


def begun() -> Leases:
    leases = Leases(SOURCE)
    assert leases.prefill(prefill()) == [Compute(prefill())]
    return leases


def computed() -> Leases:
    """Both chunks and the token are there, at time 5."""
    leases = begun()
    for number in (0, 1):
        leases.chunk_computed(NONCE, chunk(number))
    assert leases.prompt_computed(NONCE, 5.0) == []
    return leases


def test_every_chunk_has_a_ticket_that_names_all_of_it() -> None:
    leases = begun()
    assert leases.next_chunk(NONCE, 7) is None
    assert leases.next_chunk(NONCE, 15) == (0, 8)
    assert leases.chunk_computed(NONCE, chunk(0)) == [Send(ready(0))]
    assert leases.next_chunk(NONCE, 15) is None
    assert leases.next_chunk(NONCE, 20) == (8, 16)
    assert leases.chunk_computed(NONCE, chunk(1)) == [Send(ready(1))]
    assert leases.next_chunk(NONCE, 20) is None


def test_frames_that_the_other_worker_has_are_not_handed_over() -> None:
    leases = Leases(SOURCE)
    leases.prefill(prefill(start=8))
    assert leases.next_chunk(NONCE, 8) is None
    assert leases.next_chunk(NONCE, 20) == (8, 16)
    (sent,) = leases.chunk_computed(NONCE, chunk(1))
    assert isinstance(sent, Send)
    assert isinstance(issued := sent.message.ticket, Ticket)  # type: ignore[union-attr]
    assert (issued.chunk, issued.start, issued.stop, issued.last) == (0, 8, 16, True)


def test_what_has_been_put_out_already_is_part_of_the_prompt() -> None:
    leases = Leases(SOURCE)
    message = Prefill(generate(output=[1, 2, 3, 4]), NONCE, "boot of d", 0, 10.0)
    leases.prefill(message)
    assert leases.next_chunk(NONCE, 24) == (0, 24)
    (sent,) = leases.chunk_computed(NONCE, Chunk(0, 24, ((1, 2, 3), (4,)), b"sum"))
    assert isinstance(sent, Send)
    assert sent.message.ticket.token_hash == token_hash([*PROMPT, 1, 2, 3, 4])  # type: ignore[union-attr]


def test_a_lease_ends_when_its_last_chunk_has_been_taken() -> None:
    leases = computed()
    assert leases.taken(taken(0), 6.0) == []
    assert leases.taken(taken(1), 7.0) == [Drop(NONCE, "taken")]
    assert len(leases) == 0


def test_a_chunk_that_is_taken_twice_counts_once() -> None:
    leases = computed()
    assert leases.taken(taken(0), 6.0) == []
    assert leases.taken(taken(0), 6.0) == []
    assert len(leases) == 1


def test_a_chunk_that_has_no_ticket_cannot_be_taken() -> None:
    leases = begun()
    leases.chunk_computed(NONCE, chunk(0))
    assert leases.taken(taken(1), 0.0) == []
    leases.chunk_computed(NONCE, chunk(1))
    assert leases.prompt_computed(NONCE, 0.0) == []
    assert len(leases) == 1


def test_a_lease_whose_chunks_have_all_been_taken_stays_until_its_prompt_is_computed() -> None:
    leases = begun()
    for number in (0, 1):
        leases.chunk_computed(NONCE, chunk(number))
        assert leases.taken(taken(number), 0.0) == []
    assert leases.prompt_computed(NONCE, 1.0) == [Drop(NONCE, "taken")]


def test_after_a_refusal_the_prompt_is_computed_and_nothing_kept() -> None:
    leases = begun()
    leases.chunk_computed(NONCE, chunk(0))
    assert leases.refused(REFUSED) == []
    assert leases.next_chunk(NONCE, 20) is None
    assert leases.chunk_computed(NONCE, chunk(1)) == [], "its checksum was under way when the refusal came"
    assert leases.prompt_computed(NONCE, 1.0) == [Drop(NONCE, "refused")]
    assert computed().refused(REFUSED) == [Drop(NONCE, "refused")]


def test_the_time_of_a_lease_begins_when_its_prompt_is_computed_and_anew_with_each_chunk_taken() -> None:
    leases = begun()
    leases.chunk_computed(NONCE, chunk(0))
    assert leases.deadline() is None
    assert leases.tick(1e9) == []
    leases.chunk_computed(NONCE, chunk(1))
    leases.prompt_computed(NONCE, 5.0)
    assert leases.deadline() == 15.0
    leases.taken(taken(0), 8.0)
    assert leases.deadline() == 18.0
    assert leases.tick(17.9) == []
    assert leases.tick(18.0) == [Drop(NONCE, "expired")]
    assert leases.deadline() is None
    assert leases.taken(taken(1), 18.0) == [], "too late is nothing"


def test_a_release_ends_the_lease_of_that_attempt_alone() -> None:
    leases = begun()
    assert leases.release(Release("r", 2)) == []
    assert leases.release(Release("other", 1)) == []
    assert leases.release(RELEASE) == [Drop(NONCE, "released")]
    assert leases.release(RELEASE) == []
    assert leases.prompt_computed(NONCE, 0.0) == []


def test_leases_end_with_the_gateway() -> None:
    leases = computed()
    leases.prefill(prefill(nonce=b"another"))
    assert leases.closed() == [Drop(NONCE, "closed"), Drop(b"another", "closed")]
    assert len(leases) == 0


def test_a_prompt_that_the_engine_does_not_take_leaves_nothing() -> None:
    leases = begun()
    error = Unavailable("no room")
    assert leases.rejected(NONCE, error) == [Send(Failed.of(error, "r", 1))]
    assert len(leases) == 0


def test_a_prompt_that_the_engine_gives_up_ends_its_lease() -> None:
    leases = begun()
    error = Unavailable("broken")
    assert leases.failed(NONCE, error) == [Drop(NONCE, "failed"), Send(Failed.of(error, "r", 1))]
    assert leases.failed(NONCE, error) == []


def test_a_nonce_under_which_a_prompt_is_computed_is_not_used_again() -> None:
    leases = begun()
    (sent,) = leases.prefill(prefill())
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Failed)
    assert len(leases) == 1
