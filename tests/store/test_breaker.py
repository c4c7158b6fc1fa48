from __future__ import annotations

import concurrent.futures
import threading

import pytest

from tokenmill.core.clock import ManualClock
from tokenmill.transfer.store.breaker import Backoff, Breaker, State


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock, Backoff(first=0.5, longest=3.0))


def fail_a_try(tried: Breaker, clock: ManualClock) -> float:
    """Returns after how long the next try is admitted."""
    clock.advance(tried.remaining)
    assert tried.admits()
    tried.failed()
    return tried.remaining


def test_one_failure_opens_it_and_a_try_that_succeeds_closes_it(clock: ManualClock) -> None:
    tried = breaker(clock)
    assert (tried.state, tried.closed, tried.admits()) == (State.CLOSED, True, True)
    assert tried.failed() == 1
    assert (tried.state, tried.closed, tried.admits()) == (State.OPEN, False, False)
    clock.advance(0.49)
    assert not tried.admits()
    clock.advance(0.01)
    assert tried.admits()
    assert (tried.state, tried.closed) == (State.HALF_OPEN, False)
    tried.succeeded()
    assert (tried.state, tried.closed, tried.admits()) == (State.CLOSED, True, True)


def test_the_wait_doubles_up_to_its_limit(clock: ManualClock) -> None:
    tried = breaker(clock)
    tried.failed()
    assert [tried.remaining, *(fail_a_try(tried, clock) for _ in range(4))] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_no_number_of_failures_is_too_large() -> None:
    assert Backoff().after(10_000) == 30.0


def test_a_try_alone_forgets_no_failures_but_a_success_after_it_does(clock: ManualClock) -> None:
    tried = breaker(clock)
    tried.failed()
    clock.advance(0.5)
    assert tried.admits()
    tried.succeeded()
    assert tried.failed() == 2
    assert tried.remaining == 1.0
    clock.advance(1.0)
    assert tried.admits()
    tried.succeeded()
    tried.succeeded()
    assert tried.failed() == 1
    assert tried.remaining == 0.5


def test_what_ends_late_changes_nothing_while_it_is_open(clock: ManualClock) -> None:
    tried = breaker(clock)
    tried.failed()
    clock.advance(0.2)
    assert tried.failed() == 0
    tried.succeeded()
    assert tried.state is State.OPEN
    assert tried.remaining == pytest.approx(0.3)


def test_of_many_threads_one_gets_to_try(clock: ManualClock) -> None:
    tried = breaker(clock)
    tried.failed()
    clock.advance(0.5)
    ready = threading.Barrier(8)

    def attempt() -> bool:
        ready.wait()
        return tried.admits()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(future.result() for future in [pool.submit(attempt) for _ in range(8)]) == 1
