"""Every order of messages, steps, losses and deaths, in worlds small enough that all of their states can be visited (handover_world.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import pytest
from exploring import Explored, explore
from handover_parts import FAULTS, Request, Scenario

from tokenmill.worker.handover.effects import End

A = Request("a", 1)
ONE = Scenario((A,))
PAIR = Scenario((A,), prefill=1, decode=1)
TWO = Scenario((A, Request("b", 2)), prefill=1, decode=1)
CHOICES = Scenario((Request("a", 1, choices=2, separate=False),), prefill=0)
LOSSES = frozenset({"death", "loss", "read", "garbage", "failure"})


@dataclass(frozen=True)
class Case:
    """ends: how choices may end; with enough workers no single fault makes a request fail. noted: what must happen in some run."""

    scenario: Scenario
    ends: frozenset[str] = frozenset({"length"})
    noted: tuple[str, ...] = field(default=())


def ends(*names: str) -> frozenset[str]:
    return frozenset(names)


QUICK = {
    "no fault": Case(ONE, noted=("runs with 16 positions", "lease taken")),
    "any fault": Case(ONE.faulty(1), ends("length", "abort")),
    "any fault, and the first token is the last": Case(Scenario((Request("a", 1, max_tokens=1),)).faulty(1), ends("length", "abort")),
    "any fault, and a prompt of whole frames": Case(
        Scenario((Request("a", 1, length=16),)).faulty(1), ends("length", "abort"), ("runs with 15 positions",)
    ),
    "any fault, and several choices": Case(CHOICES.faulty(1), ends("length", "abort", "stop")),
    "two losses": Case(PAIR.faulty(2, "death", "read", "cancel", "failure"), ends("length", "abort", "failed")),
    "two doubts": Case(PAIR.faulty(2, "loss", "garbage", "cancel", "suspicion"), ends("length", "abort", "failed")),
    "two delays": Case(PAIR.faulty(2, "tick", "stuck", "refusal", "cancel"), ends("length", "abort", "failed")),
    "reads hang": Case(ONE.faulty(2, "stuck", "cancel", "tick"), ends("length", "abort")),
    "messages come twice": Case(PAIR.faulty(1, "replay"), ends("length", "failed"), ("chunk nonce",)),
    "the gateway restarts": Case(PAIR.faulty(1, "gateway"), ends("length", "failed")),
    "two prompts in the same frames": Case(TWO.faulty(1, "read"), ends("length"), ("runs with 8 positions",)),
    "one prompt twice": Case(Scenario((A, Request("b", 1)), 1, 1, prefill_frames=4)),
    "never room to decode": Case(Scenario((A,), decode_frames=1), ends("failed")),
    "never room to prefill": Case(Scenario((A,), prefill_frames=1), ends("length"), ("runs with 0 positions",)),
}

DEEP = {
    "any two faults": Case(ONE.faulty(2), ends("length", "abort", "failed")),
    "any two faults, one worker of each kind": Case(PAIR.faulty(2), ends("length", "abort", "failed")),
    "any two faults, and several choices": Case(CHOICES.faulty(2), ends("length", "abort", "stop", "failed")),
    "any fault, and two prompts": Case(
        Scenario((A, Request("b", 2, length=9)), 1, 1).faulty(1), ends("length", "abort", "failed"), ("chunk corrupt",)
    ),
    "the gateway restarts and messages come twice": Case(PAIR.faulty(2, "gateway", "replay"), ends("length", "failed")),
    "the gateway restarts, four workers": Case(ONE.faulty(1, "gateway"), ends("length", "failed")),
    "three losses": Case(PAIR.faulty(3, *LOSSES), ends("length", "failed")),
}


def visit(name: str, case: Case) -> Explored:
    found = explore(case.scenario)
    print(f"{name}: {found}")
    assert set(found.ends) == case.ends, f"choices end with {dict(found.ends)}"
    assert all(found.noted[note] for note in case.noted), f"what happens is {dict(found.noted)}"
    return found


def test_all_runs_end_well() -> None:
    everything: set[str] = set()
    states = 0
    for name, case in QUICK.items():
        found = visit(name, case)
        states += found.states
        everything |= set(found.noted)
    print(f"{states} states")
    assert {f"{kind} {why}" for kind in ("lease", "reservation") for why in get_args(End)} - everything == {
        "reservation taken",
        "reservation refused",
        "reservation failed",
    }, "a way for a lease or a reservation to end is never gone"
    assert {"chunk nonce", "chunk lost", "chunk corrupt"} <= everything


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEEP)
def test_all_runs_with_more_faults_end_well(name: str) -> None:
    visit(name, DEEP[name])


def test_every_kind_of_fault_is_tried() -> None:
    assert frozenset().union(*(case.scenario.kinds for case in QUICK.values() if case.scenario.faults)) == FAULTS
