"""Whether a request is separated, and the rates by which that is decided."""

from __future__ import annotations

import math

import pytest

from tokenmill.cluster.rates import HALF_LIFE, Rates
from tokenmill.cluster.separation import Separation, SeparationPolicy, Side, must_stay_whole
from tokenmill.core.clock import ManualClock
from tokenmill.core.errors import ConfigError
from tokenmill.core.types import SamplingParams

BYTES = 20_000
"""Of KV per token."""


def side(worker_id: str, cached: int = 0, queued: int = 0, streams: int = 0, chunk_size: int = 512) -> Side:
    return Side(worker_id, cached, queued, streams, chunk_size)


class Setup:
    """Both workers compute 1000 tokens a second, the link carries 100 MB/s, and a hand-over takes 10 ms beside that."""

    def __init__(self, **policy: float) -> None:
        self.clock = ManualClock(100.0)
        defaults = {"prefill_speed": 1000.0, "transfer_rate": 1e8, "handover_seconds": 0.01} | policy
        self.separation = Separation(self.clock, SeparationPolicy(**defaults))  # type: ignore[arg-type]

    def decide(self, tokens: int, prefill: Side, decode: Side, bytes_per_token: int = BYTES) -> bool:
        return self.separation.decide(tokens, prefill, decode, bytes_per_token).separate


P, IDLE = side("p"), side("d")


def test_beside_running_streams_a_long_prompt_is_separated_and_without_them_it_is_not() -> None:
    setup = Setup()
    assert setup.decide(2000, P, side("d", streams=10))
    assert not setup.decide(2000, P, IDLE)


def test_a_prompt_of_which_little_must_be_computed_stays_whole_however_busy_the_decode_worker_is() -> None:
    setup = Setup()
    busy = side("d", streams=200, queued=5000)
    assert not setup.decide(63, P, busy)
    assert setup.decide(64, P, busy)
    cached = busy._replace(cached_tokens=2000)
    assert not setup.decide(2063, P, cached)
    assert "only 63 tokens" in setup.separation.decide(2063, P, cached, BYTES).reason
    assert setup.decide(2064, P, cached)


def test_what_is_expected_is_exactly_the_waiting_of_the_request_and_of_streams_beside_it() -> None:
    setup = Setup()
    decision = setup.separation.decide(
        3000, side("p", cached=500, queued=700, streams=2, chunk_size=1000), side("d", cached=1000, queued=400, streams=5), BYTES
    )
    # whole: 400 before it, 2000 of it, and five streams wait for these 2000.
    assert decision.whole_seconds == pytest.approx(0.4 + 2.0 * 6)
    # separated: 700 before it, 2500 of it, two streams beside; 2000 tokens are 0.4 s of bytes, of which the last 1000 are waited for.
    assert decision.separate_seconds == pytest.approx(0.7 + 2.5 * 3 + 0.2 + 0.01)


def test_a_link_slower_than_the_prefill_is_waited_for() -> None:
    setup = Setup(transfer_rate=1e7)
    decision = setup.separation.decide(1000, P, IDLE, BYTES)
    assert decision.separate_seconds == pytest.approx(0.512 + 2.0 + 0.01), "it is busy from the end of the first chunk on"
    decision = setup.separation.decide(1000, side("p", cached=1000), IDLE, BYTES)
    assert decision.separate_seconds == pytest.approx(0.001 + 2.0 + 0.01), "what is known already can be fetched at once"


def test_a_prompt_shorter_than_a_chunk_is_fetched_when_it_is_computed() -> None:
    decision = Setup().separation.decide(100, P, side("d", queued=1000), BYTES)
    assert decision.separate_seconds == pytest.approx(0.1 + 0.02 + 0.01)


def test_each_ingredient_can_turn_the_decision() -> None:
    setup = Setup()
    decode = side("d", streams=3)
    assert setup.decide(1000, P, decode)
    assert not setup.decide(1000, side("p", queued=4000), decode)
    assert not setup.decide(1000, side("p", streams=4), decode)
    assert not setup.decide(1000, P, side("d", streams=3, cached=900))
    assert not setup.decide(1000, P, decode, bytes_per_token=2_000_000)
    assert setup.decide(1000, P, side("d", queued=4000))
    assert setup.decide(1000, side("p", cached=900), IDLE)


def test_a_worker_hands_nothing_over_to_itself() -> None:
    decision = Setup().separation.decide(2000, side("w", streams=5), side("w", streams=5), BYTES)
    assert (decision.separate, decision.reason) == (False, "both are the same worker")


def test_a_gain_that_is_too_small_does_not_pay() -> None:
    decode = side("d", queued=500)
    assert Setup(min_gain=0.38).decide(1000, P, decode, bytes_per_token=20_000)
    assert not Setup(min_gain=0.40).decide(1000, P, decode, bytes_per_token=20_000)


def test_what_is_measured_replaces_what_was_expected() -> None:
    setup = Setup()
    decode = side("d", streams=3)
    for _ in range(20):
        setup.separation.observe_prefill("p", 512, 5.12)
        setup.separation.observe_prefill("d", 512, 0.512)
    assert setup.separation.prefill_speed("p") == pytest.approx(100, rel=0.2)
    assert setup.separation.prefill_speed("d") == pytest.approx(1000, rel=0.2)
    assert not setup.decide(1000, P, decode)
    setup = Setup()
    for _ in range(20):
        setup.separation.observe_transfer("p", "d", 10**7, 10.0)
    assert not setup.decide(1000, P, decode)
    assert not setup.decide(1000, P, side("e", streams=3)), "what one link has shown is expected of others, a little less"
    for _ in range(20):
        setup.separation.observe_transfer("p", "e", 10**7, 0.01)
    assert setup.decide(1000, P, side("e", streams=3))
    setup = Setup()
    for _ in range(20):
        setup.separation.observe_handover(5.0)
    assert not setup.decide(1000, P, decode)


def test_a_worker_that_has_left_leaves_no_measurements() -> None:
    setup = Setup()
    assert setup.separation.prefill_speed("p") is None
    setup.separation.observe_prefill("p", 100, 1.0)
    setup.separation.observe_transfer("p", "d", 1000, 1.0)
    setup.separation.observe_transfer("d", "p", 1000, 1.0)
    setup.separation.observe_transfer("d", "e", 1000, 1.0)
    setup.separation.forget("p")
    assert setup.separation.prefill_speed("p") is None
    assert list(setup.separation._transfer) == [("d", "e")]


@pytest.mark.parametrize("name", ["prefill_speed", "transfer_rate", "handover_seconds"])
def test_what_is_expected_must_be_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0, but must be above 0"):
        SeparationPolicy(**{name: 0})


@pytest.mark.parametrize("name", ["min_tokens", "min_gain"])
def test_limits_must_not_be_negative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1, but must be at least 0"):
        SeparationPolicy(**{name: -1})


# what can't be separated


def test_most_requests_can_be_separated() -> None:
    assert must_stay_whole(SamplingParams(logprobs=5, seed=1), 1000) is None
    assert must_stay_whole(SamplingParams(kv_budget_mb=5), 1000, first_point=1064) is None


@pytest.mark.parametrize(
    ("params", "first_point", "reason"),
    [
        (SamplingParams(n=2), None, "it has 2 choices"),
        (SamplingParams(prompt_logprobs=0), None, "it asks for log-probabilities of its prompt"),
        (SamplingParams(kv_budget_mb=1), 500, "its KV budget drops frames at 500 tokens"),
        (SamplingParams(kv_budget_mb=1), 1063, "its KV budget drops frames at 1063 tokens"),
    ],
)
def test_what_can_not_be_separated_says_why(params: SamplingParams, first_point: int | None, reason: str) -> None:
    assert must_stay_whole(params, 1000, first_point) == reason


# rates


def test_large_measurements_count_for_more() -> None:
    rates = Rates[str](ManualClock(), 100.0, worth=0.001)
    rates.observe("a", 1000, 10.0)
    rates.observe("a", 1, 0.001)
    assert rates.of("a") == pytest.approx(100.1, rel=0.001)


def test_a_key_that_is_not_known_is_expected_to_be_as_all_others() -> None:
    rates = Rates[str](ManualClock(), 100.0, worth=1.0)
    assert rates.of("a") == 100.0
    rates.observe("b", 1000, 1.0)
    assert rates.of("a") == pytest.approx((1000 + 100) / 2)
    assert rates.of("b") == pytest.approx((1000 + 550) / 2)
    assert (rates.measured("a"), rates.measured("b")) == (False, True)


def test_measurements_fade_towards_what_was_expected() -> None:
    clock = ManualClock(1e6)
    rates = Rates[str](clock, 100.0, worth=1.0)
    rates.observe("a", 8, 8.0)
    slow = rates.of("a")
    clock.advance(HALF_LIFE)
    overall = (4 + 100) / 5
    assert rates.of("a") == pytest.approx((4 + overall) / 5)
    clock.advance(20 * HALF_LIFE)
    assert slow < 13
    assert rates.of("a") == pytest.approx(100.0, rel=0.01)


def test_one_disturbed_measurement_counts_little_and_a_true_change_is_followed() -> None:
    rates = Rates[str](ManualClock(), 100.0, worth=1.0)
    for _ in range(10):
        rates.observe("a", 100, 1.0)
    rates.observe("a", 100, 600.0)
    assert rates.of("a") > 70
    for _ in range(10):
        rates.observe("a", 100, 10.0)
    assert rates.of("a") < 25


def test_the_first_measurement_of_a_worker_is_believed_however_slow_it_is() -> None:
    rates = Rates[str](ManualClock(), 1000.0, worth=0.25)
    rates.observe("a", 512, 51.2)
    assert rates.of("a") < 20


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (1, 0.0), (-1, 1.0), (1, -1.0)])
def test_nothing_and_no_time_are_no_measurement(amount: float, seconds: float) -> None:
    rates = Rates[str](ManualClock(), 100.0, worth=1.0)
    rates.observe("a", amount, seconds)
    assert not rates.measured("a")
    assert rates.of("a") == 100.0


def test_rates_stay_finite_after_a_year_of_silence() -> None:
    clock = ManualClock()
    rates = Rates[str](clock, 100.0, worth=1.0)
    rates.observe("a", 5, 1.0)
    clock.advance(365 * 86400)
    assert math.isfinite(rates.of("a"))
    rates.observe("a", 5, 1.0)
    assert rates.of("a") < 100
