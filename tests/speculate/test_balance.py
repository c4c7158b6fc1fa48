"""Drafting that does not pay rests, for longer each time."""

from __future__ import annotations

from tokenmill.speculate.balance import ENOUGH, LONGEST, SHORTEST, Balance


def rest(balance: Balance) -> int:
    """Steps until it drafts again."""
    steps = 0
    while balance.rests():
        steps += 1
    return steps


def work(balance: Balance, took: float, would: float, steps: int = 40) -> int:
    """Draft with that success until it rests; returns how long that is."""
    for _ in range(steps):
        balance.note(took, would)
        if found := rest(balance):
            return found
    return 0


def test_what_pays_goes_on() -> None:
    assert work(Balance(), took=1.0, would=1.5) == 0
    assert work(Balance(), took=1.0, would=1.0) == 0


def test_what_does_not_pay_rests_for_longer_each_time() -> None:
    balance = Balance()
    rests = [work(balance, took=1.0, would=0.8) for _ in range(8)]
    assert rests == [min(LONGEST, SHORTEST * 2**n) for n in range(8)]
    assert work(balance, took=1.0, would=2.0) == 0
    assert work(balance, took=1.0, would=0.1) == SHORTEST


def test_a_few_bad_steps_are_no_verdict() -> None:
    balance = Balance()
    for _ in range(int(ENOUGH) - 1):
        balance.note(2.0, 1.0)
    assert not balance.rests()


def test_what_is_lost_is_bounded() -> None:
    """Drafts that are never right and cost as much as the step itself: over a long answer, a few percent."""
    balance, took, would = Balance(), 0.0, 0.0
    for _ in range(10_000):
        if balance.rests():
            took += 1.0
        else:
            took += 2.0
            balance.note(2.0, 1.0)
        would += 1.0
    assert took < 1.03 * would
