from __future__ import annotations

import random

import pytest

from tokenmill.core.clock import ManualClock
from tokenmill.transfer.store.choice import ChoicePolicy, FetchOrCompute

MB = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(5.0)


def measured(clock: ManualClock, trip: float = 0.001, rate: float = 1e9, prefill: float = 1000.0) -> FetchOrCompute:
    """Fetching at `rate` bytes per second after a `trip`, computing `prefill` tokens per second."""
    choice = FetchOrCompute(clock)
    choice.asked(trip)
    choice.fetched(8 * MB, trip + 8 * MB / rate)
    choice.computed(512, 512 / prefill)
    return choice


def test_what_was_never_measured_is_hoped_for(clock: ManualClock) -> None:
    assert FetchOrCompute(clock).worth(7, MB, 64) == 7
    choice = FetchOrCompute(clock)
    choice.computed(512, 1e-9)
    assert choice.worth(7, MB, 64) == 7
    choice = FetchOrCompute(clock)
    choice.asked(1.0)
    choice.fetched(MB, 100.0)
    assert choice.worth(7, MB, 64) == 7, "how fast computing is has not been measured"


def test_nothing_found_is_nothing_to_fetch(clock: ManualClock) -> None:
    assert measured(clock).worth(0, MB, 64) == 0


def test_the_faster_of_the_two_is_chosen(clock: ManualClock) -> None:
    assert measured(clock).worth(10, MB, 64) == 10  # 11 ms against 640 ms
    assert measured(clock, rate=1e6).worth(10, MB, 64) == 0  # 10 s against 640 ms
    assert measured(clock, prefill=1e6).worth(10, MB, 64) == 0  # 11 ms against 0.64 ms


def test_a_round_trip_must_be_earned(clock: ManualClock) -> None:
    choice = measured(clock, trip=0.3)  # a block is 1 ms to fetch and 64 ms to compute
    assert [choice.worth(found, MB, 64) for found in (1, 4, 5, 50)] == [0, 0, 5, 50]


def test_what_is_queued_before_it_must_be_earned_too(clock: ManualClock) -> None:
    choice = measured(clock)
    assert choice.worth(2, MB, 64, queued_bytes=100 * MB) == 2
    assert choice.worth(2, MB, 64, queued_bytes=130 * MB) == 0


def test_a_deadline_allows_for_what_comes_until_then(clock: ManualClock) -> None:
    choice = measured(clock)
    assert choice.worth(10, MB, 64, within=0.0055) == 4
    assert choice.worth(10, MB, 64, within=100.0) == 10
    assert choice.worth(10, MB, 64, within=0.0015) == 0
    assert choice.worth(10, MB, 64, within=0.0055, queued_bytes=2 * MB) == 2
    assert choice.worth(10, MB, 64, within=0.0) == 0
    assert choice.worth(10, MB, 64, within=-1.0) == 0
    assert FetchOrCompute(clock).worth(10, MB, 64, within=-1.0) == 0


def test_the_decision_is_the_cheaper_one_for_any_costs(clock: ManualClock) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    source = random.Random(seed)
    for _ in range(2000):
        trip, rate, prefill = 10 ** source.uniform(-5, 0), 10 ** source.uniform(6, 10), 10 ** source.uniform(1, 5)
        found, size, queued = source.randrange(1, 200), source.randrange(1, 4 * MB), source.choice([0, source.randrange(100 * MB)])
        choice = FetchOrCompute(clock)
        choice.asked(trip)
        choice.fetched(100 * MB, trip + 100 * MB / rate)
        choice.computed(1000, 1000 / prefill)
        fetching = trip + (queued + found * size) / rate
        computing = found * 64 / prefill
        if max(fetching, computing) > 1.001 * min(fetching, computing) and trip < 80 * MB / rate:
            assert choice.worth(found, size, 64, queued_bytes=queued) == (found if fetching < computing else 0)


def test_the_latest_measurements_count_most(clock: ManualClock) -> None:
    choice = measured(clock)
    for _ in range(20):
        choice.fetched(8 * MB, 80.0)
    assert choice.worth(10, MB, 64) == 0
    for _ in range(40):
        choice.fetched(8 * MB, 0.009)
    assert choice.worth(10, MB, 64) == 10


def test_a_single_outlier_does_not_decide(clock: ManualClock) -> None:
    choice = measured(clock)
    for _ in range(10):
        choice.fetched(8 * MB, 0.009)
    choice.fetched(1000, 0.05)
    assert choice.worth(10, MB, 64) == 10


def test_a_large_measurement_weighs_more_than_a_small_one(clock: ManualClock) -> None:
    choice = FetchOrCompute(clock)
    choice.computed(512, 0.512)
    for _ in range(5):
        choice.fetched(8 * MB, 0.008)
        choice.fetched(10, 0.0001)  # a hundred times as slow per byte
    assert choice.worth(10, 60 * MB, 64) == 10


def test_now_and_then_one_block_is_fetched_to_see_whether_it_still_does_not_pay(clock: ManualClock) -> None:
    choice = FetchOrCompute(clock, ChoicePolicy(again_after=10.0))
    choice.asked(0.001)
    choice.fetched(MB, 10.0)
    choice.computed(512, 0.5)
    assert choice.worth(5, MB, 64) == 0
    clock.advance(9.9)
    assert choice.worth(5, MB, 64) == 0
    clock.advance(0.1)
    assert [choice.worth(5, MB, 64) for _ in range(3)] == [1, 0, 0]
    choice.fetched(MB, 0.001)
    for _ in range(60):
        choice.fetched(MB, 0.001)
    assert choice.worth(5, MB, 64) == 5


def test_measurements_of_nothing_say_nothing(clock: ManualClock) -> None:
    choice = FetchOrCompute(clock)
    choice.computed(0, 1.0)
    choice.fetched(0, 1.0)
    assert choice.worth(3, MB, 64) == 3


def test_an_answer_faster_than_the_average_trip_has_a_rate(clock: ManualClock) -> None:
    choice = FetchOrCompute(clock)
    choice.asked(1.0)
    choice.fetched(MB, 0.5)
    choice.computed(512, 5.12)
    assert choice.worth(30, MB, 64, within=3.6) == 30
    assert choice.worth(30, MB, 64, within=2.0) == 20
