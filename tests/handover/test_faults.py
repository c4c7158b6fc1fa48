"""The faults that a hand-over must survive, one by one, each in one run of the whole world (test_model.py has all runs)."""

from __future__ import annotations

import pytest
from handover_parts import Request, Scenario
from handover_world import World

ONE = Scenario((Request("a", 1),))
LONGER = Scenario((Request("a", 1, max_tokens=3),))
PAIR = Scenario((Request("a", 1),), prefill=1, decode=1)
TWO = Scenario((Request("a", 1), Request("b", 2)), prefill=1, decode=1)
OVERTAKEN = ("d1 reads", "d1 decodes")


class Play:
    """One run. What happens next is the first event that may, unless a test says otherwise."""

    def __init__(self, scenario: Scenario, *faults: str) -> None:
        self.world = World(scenario.faulty(len(faults), *faults))
        self.noted: list[str] = []

    def do(self, start: str) -> None:
        """The first event or fault whose name begins so."""
        event = next(event for event in self.world.events() + self.world.faults() if event[0].startswith(start))
        self.world = self.world.after(event)
        self.noted += self.world.noted

    def until(self, start: str, hold: tuple[str, ...] = ()) -> None:
        """Go on until an event can happen whose name begins so, without any that begins as those in `hold`."""
        while not any(name.startswith(start) for name, _ in self.world.events()):
            self.do(next(name for name, _ in self.world.events() if not name.startswith(hold or "nothing")))

    def rest(self, hold: tuple[str, ...] = ()) -> None:
        """Go on until nothing else can happen."""
        while names := [name for name, _ in self.world.events() if not name.startswith(hold or "nothing")]:
            self.do(names[0])

    def ends(self) -> dict[str, str]:
        """How each request ends, when the run has been played to its end."""
        self.rest()
        self.world.check_end()
        return {request_id: end for (request_id, _), end in self.world.at("client").ends.items()}

    def ran(self, positions: int) -> bool:
        return f"runs with {positions} positions" in self.noted


def test_without_a_fault_all_frames_are_handed_over() -> None:
    play = Play(ONE)
    assert play.ends() == {"a": "length"}
    assert play.ran(16)
    assert "lease taken" in play.noted


def test_a_stale_ticket_is_replayed_when_the_request_has_ended() -> None:
    play = Play(ONE, "replay")
    play.rest()
    play.do("replay: gateway>d1 Ready")
    assert play.ends() == {"a": "length"}
    assert "chunk nonce" in play.noted


def test_a_stale_ticket_is_replayed_to_a_reservation_that_differs_in_its_nonce_alone() -> None:
    play = Play(PAIR, "gateway", "replay")
    play.until("d1 reads")
    play.do("gateway")
    play.rest(hold=("p1 computes",))
    assert len(play.world.at("d1").reservations) == 1
    play.do("replay: gateway>d1 Ready")
    assert "chunk nonce" not in play.noted
    play.do("arrives: gateway>d1")
    assert "chunk nonce" in play.noted
    assert play.ends() == {"a": "length"}


def test_a_prefill_aborts_while_the_decode_worker_waits() -> None:
    play = Play(ONE, "failure")
    play.until("p1 computes")
    play.do("p1 computes")
    play.until("d1 reads", hold=("p1 computes",))
    play.do("failure: p1")
    play.until("p2 computes")
    assert play.ends() == {"a": "length"}
    assert play.noted.count("lease failed") == 1
    assert play.noted.count("lease taken") == 1


@pytest.mark.parametrize(
    ("moment", "noted"),
    [
        ("router answers a: NeedDecode", []),
        ("arrives: gateway>d1", ["reservation released"]),
        ("arrives: d1>gateway", ["reservation released"]),
        ("p1 computes", ["lease released", "reservation released"]),
        ("d1 reads", ["lease released", "reservation released"]),
        ("d1 decodes", ["lease taken"]),
    ],
    ids=["before there is a worker", "before it is reserved", "when it is reserved", "during prefill", "during transfer", "after prefill"],
)
def test_a_request_is_cancelled(moment: str, noted: list[str]) -> None:
    play = Play(ONE, "cancel")
    play.rest(hold=(moment,))
    play.do("cancel: a")
    assert play.ends() == {"a": "abort"}
    assert sorted(note for note in play.noted if "runs" not in note) == noted


def test_a_decode_worker_refuses_after_the_prefill() -> None:
    play = Play(LONGER, "failure")
    play.until("d1 decodes")
    play.do("failure: d1")
    play.until("d2 decodes")
    assert play.ends() == {"a": "length"}
    assert play.noted.count("runs with 16 positions") == 2, "the prefill worker had the prompt in its prefix tree"


def test_a_peer_restarts_at_the_same_address_and_has_another_prompt_in_the_same_frames() -> None:
    play = Play(TWO, "death")
    play.until("d1 reads")
    play.do("death: p1, after 0")
    play.rest(hold=OVERTAKEN)
    frames = [frame.content for frame in play.world.at("p1").frames]
    ticket = play.world.at("d1").reads[b"d1.0#1"].ticket
    assert ticket.prefill_boot != play.world.at("p1").process.boot
    assert None not in frames
    play.do("d1 reads for b'd1.0#1'")
    assert "chunk corrupt" in play.noted
    assert play.ends() == {"a": "length", "b": "length"}


def test_a_lease_expires_and_its_frames_are_used_for_another_prompt() -> None:
    play = Play(TWO, "tick")
    play.rest(hold=(*OVERTAKEN, "router answers b"))
    play.do("tick: p1")
    assert play.noted[-1] == "lease expired"
    play.rest(hold=OVERTAKEN)
    play.do("d1 reads for b'd1.0#1'")
    assert "chunk corrupt" in play.noted
    assert play.ends() == {"a": "length", "b": "length"}


def test_a_decode_worker_gives_up_waiting() -> None:
    play = Play(ONE, "tick")
    play.until("p1 computes")
    play.do("tick: d1")
    assert play.noted[-1] == "reservation expired"
    assert play.ends() == {"a": "length"}
    assert "lease released" in play.noted


@pytest.mark.parametrize("delivered", [True, False])
def test_the_router_restarts(delivered: bool) -> None:
    play = Play(ONE, "gateway")
    play.until("d1 reads")
    play.do(f"gateway: its last messages {delivered}")
    assert play.ends() == {"a": "length"}
    assert {"lease closed", "reservation closed"} <= set(play.noted)


def test_the_router_restarts_while_a_request_decodes() -> None:
    play = Play(ONE, "gateway")
    play.until("d1 decodes")
    play.do("gateway")
    assert play.ends() == {"a": "length"}


def test_no_prefill_worker_is_left() -> None:
    play = Play(PAIR, "loss")
    play.until("p1 computes")
    play.do("loss: p1")
    assert play.ends() == {"a": "length"}
    assert play.ran(0), "the decode worker computes the prompt itself"


def test_no_decode_worker_is_left() -> None:
    play = Play(PAIR, "loss")
    play.until("d1 decodes")
    play.do("loss: d1")
    assert play.ends() == {"a": "failed"}
