"""When a step does without drafts, so that it is known what one takes."""

from __future__ import annotations

from tokenmill.speculate.checks import LATEST, SOONEST, Checks
from tokenmill.speculate.costs import CHECK, StepCosts


def until_due(checks: Checks) -> int:
    steps = 0
    while not checks.due:
        checks.note_drafts()
        steps += 1
    return steps


def test_checks_become_rare_as_long_as_they_find_nothing_new() -> None:
    checks, found = Checks(), []
    for _ in range(7):
        found.append(until_due(checks))
        checks.note_plain(believed=1.0, took=1.1)
    assert found == [SOONEST, 2 * SOONEST, 4 * SOONEST, 8 * SOONEST, LATEST, LATEST, LATEST]
    until_due(checks)
    checks.note_plain(believed=1.0, took=0.5)
    assert until_due(checks) == SOONEST


def test_a_plain_step_that_came_by_itself_is_as_good_as_a_check() -> None:
    checks = Checks()
    for _ in range(5 * SOONEST):
        checks.note_drafts()
        checks.note_plain(believed=1.0, took=9.0)
    assert not checks.due


def test_what_was_believed_of_a_plain_step_is_put_right_in_a_few_checks() -> None:
    costs = StepCosts()
    costs.observe(16, 0.100)
    for _ in range(4):
        costs.observe(16, 0.057, CHECK)
    assert costs.seconds(16) < 0.060
