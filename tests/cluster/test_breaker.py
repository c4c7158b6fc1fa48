"""Circuit breakers under a clock that is told to move."""

from __future__ import annotations

import pytest

from tokenmill.cluster.breaker import Attempt, BreakerPolicy, Breakers, Circuit
from tokenmill.core.clock import ManualClock
from tokenmill.core.errors import ConfigError

POLICY = BreakerPolicy(failures=3, first_open=1.0, longest_open=8.0, forgiven_after=60.0, probe_within=30.0)


class Setup:
    def __init__(self) -> None:
        self.clock = ManualClock(500.0)
        self.breakers = Breakers(self.clock, POLICY)

    def fail(self, times: int = 1, key: str = "w") -> None:
        for _ in range(times):
            self.breakers.failed(self.breakers.begin(key))

    def opened(self) -> Setup:
        self.fail(3)
        assert self.breakers.circuit("w") is Circuit.OPEN
        return self

    def probe(self) -> Attempt:
        """The attempt that decides, when an open breaker's time is over."""
        self.clock.advance(1.0)
        probe = self.breakers.begin("w")
        assert self.breakers.circuit("w") is Circuit.HALF_OPEN
        return probe


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not_let_it() -> None:
    setup = Setup()
    setup.fail(2)
    setup.breakers.succeeded(setup.breakers.begin("w"))
    setup.fail(2)
    assert setup.breakers.admits("w")
    setup.fail(1)
    assert (setup.breakers.circuit("w"), setup.breakers.admits("w")) == (Circuit.OPEN, False)
    assert list(setup.breakers.tripped) == ["w"]
    assert setup.breakers.admits("another")


def test_after_its_time_one_attempt_passes_and_its_success_closes_it() -> None:
    setup = Setup().opened()
    setup.clock.advance(0.999)
    assert not setup.breakers.admits("w")
    setup.clock.advance(0.001)
    assert setup.breakers.admits("w")
    probe = setup.breakers.begin("w")
    assert (setup.breakers.circuit("w"), setup.breakers.admits("w")) == (Circuit.HALF_OPEN, False)
    setup.breakers.succeeded(probe)
    assert (setup.breakers.circuit("w"), setup.breakers.admits("w"), dict(setup.breakers.tripped)) == (Circuit.CLOSED, True, {})
    setup.fail(2)
    assert setup.breakers.admits("w"), "failures from before do not count any more"


def test_each_failed_attempt_doubles_the_time_up_to_the_longest() -> None:
    setup = Setup().opened()
    for seconds in (1.0, 2.0, 4.0, 8.0, 8.0):
        setup.clock.advance(seconds - 0.001)
        assert not setup.breakers.admits("w")
        setup.clock.advance(0.001)
        assert setup.breakers.admits("w")
        setup.fail(1)
        assert setup.breakers.circuit("w") is Circuit.OPEN


def test_the_time_starts_anew_only_after_it_was_closed_for_a_while() -> None:
    for closed_for, wait in ((59.0, 2.0), (60.0, 1.0)):
        setup = Setup().opened()
        setup.breakers.succeeded(setup.probe())
        setup.clock.advance(closed_for)
        setup.opened()
        setup.clock.advance(wait - 0.001)
        assert not setup.breakers.admits("w")
        setup.clock.advance(0.001)
        assert setup.breakers.admits("w")


def test_attempts_from_before_it_opened_have_no_say() -> None:
    setup = Setup()
    old = [setup.breakers.begin("w") for _ in range(4)]
    setup.opened()
    setup.breakers.succeeded(old[0])
    assert setup.breakers.circuit("w") is Circuit.OPEN
    probe = setup.probe()
    setup.breakers.succeeded(old[1])
    setup.breakers.failed(old[2])
    setup.breakers.dropped(old[3])
    assert (setup.breakers.circuit("w"), setup.breakers.admits("w")) == (Circuit.HALF_OPEN, False)
    setup.breakers.succeeded(probe)
    setup.breakers.failed(probe)
    setup.fail(2)
    assert setup.breakers.circuit("w") is Circuit.CLOSED


def test_what_begins_without_being_admitted_decides_nothing() -> None:
    setup = Setup().opened()
    setup.breakers.succeeded(setup.breakers.begin("w"))
    assert setup.breakers.circuit("w") is Circuit.OPEN
    probe = setup.probe()
    second = setup.breakers.begin("w")
    setup.breakers.succeeded(second)
    setup.breakers.failed(second)
    assert setup.breakers.circuit("w") is Circuit.HALF_OPEN
    setup.breakers.failed(probe)
    assert setup.breakers.circuit("w") is Circuit.OPEN


def test_an_attempt_that_is_dropped_lets_the_next_one_decide_at_once() -> None:
    setup = Setup().opened()
    setup.breakers.dropped(setup.probe())
    assert setup.breakers.admits("w")
    setup.breakers.succeeded(setup.breakers.begin("w"))
    assert setup.breakers.circuit("w") is Circuit.CLOSED


def test_a_drop_while_it_is_closed_is_neither_success_nor_failure() -> None:
    setup = Setup()
    setup.fail(2)
    setup.breakers.dropped(setup.breakers.begin("w"))
    setup.fail(1)
    assert setup.breakers.circuit("w") is Circuit.OPEN


def test_an_attempt_that_is_never_heard_of_does_not_keep_it_half_open_for_good() -> None:
    setup = Setup().opened()
    lost = setup.probe()
    setup.clock.advance(29.999)
    assert not setup.breakers.admits("w")
    setup.clock.advance(0.001)
    assert setup.breakers.admits("w")
    probe = setup.breakers.begin("w")
    setup.breakers.failed(lost)
    assert setup.breakers.circuit("w") is Circuit.HALF_OPEN
    setup.breakers.succeeded(probe)
    assert setup.breakers.circuit("w") is Circuit.CLOSED


def test_a_worker_that_left_is_forgotten_with_its_links_and_attempts_of_its_time_have_no_say_about_the_next() -> None:
    setup = Setup()
    keys: list[str | tuple[str, str]] = ["w", ("w", "x"), ("x", "w"), "x", ("x", "y")]
    closed = [setup.breakers.begin(("w", "z")) for _ in range(3)]
    old = [setup.breakers.begin(key) for key in keys for _ in range(3)]
    for key in keys:
        for _ in range(3):
            setup.breakers.failed(setup.breakers.begin(key))
    setup.breakers.forget("w")
    assert [setup.breakers.circuit(key) for key in keys] == ["closed", "closed", "closed", "open", "open"]
    for attempt in old + closed:
        setup.breakers.failed(attempt)
    assert [setup.breakers.circuit(key) for key in keys] == ["closed", "closed", "closed", "open", "open"]
    assert setup.breakers.admits("w")
    assert setup.breakers.admits(("w", "z"))


def test_a_worker_whose_name_is_part_of_another_is_not_forgotten_with_it() -> None:
    setup = Setup()
    setup.fail(3, "worker-10")
    setup.breakers.forget("worker-1")
    assert setup.breakers.circuit("worker-10") is Circuit.OPEN


@pytest.mark.parametrize(("name", "value", "least"), [("failures", 0, 1), ("first_open", -1, 0), ("probe_within", float("nan"), 0)])
def test_settings_out_of_range_are_refused(name: str, value: float, least: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}, but must be at least {least}"):
        BreakerPolicy(**{name: value})


@pytest.mark.parametrize("times", [1, 5, 40, 10_000])
def test_the_time_open_has_a_bound_however_often_it_opens(times: int) -> None:
    assert POLICY.open_for(times) == min(2.0 ** min(times - 1, 100), 8.0)
