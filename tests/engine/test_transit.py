"""Leases and reservations: who holds which frames, and when they go. Bytes play no part in it."""

from __future__ import annotations

import threading

import pytest

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.transit import Transit
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window
from tokenmill.kv.manager import KVManager
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence

TOKENS = list(range(100, 190))


def pool(frames: int, *rules: Retention) -> tuple[KVManager, Transit]:
    groups = [KVGroup(f"group {number}", rule, ((number, 0),)) for number, rule in enumerate(rules or (Whole(),))]
    kv = KVManager(groups, frames, BlockManagerConfig(block_size=8))
    return kv, Transit(kv, chunk=32)


def compute(kv: KVManager, tokens: list[int], upto: int, salt: str = "") -> None:
    """As a sequence does that is over then."""
    kv.acquire("computed", tokens, salt)
    assert kv.reserve("computed", upto)
    kv.commit("computed", tokens, upto)
    kv.release("computed")


def bring(transit: Transit, key: str, *stops: int) -> None:
    for stop in stops:
        assert transit.place(key, stop) is not None
        transit.land(key, stop)


def test_what_has_come_is_found_by_the_sequence_that_goes_on_and_by_others() -> None:
    kv, transit = pool(64)
    assert transit.reserve("r", TOKENS, "", spare=0) == 0
    bring(transit, "r", 32, 88)
    assert kv.match(TOKENS, "").frames == 11
    transit.release("r")
    kv.check_integrity()
    assert (kv.n_held, kv.match(TOKENS, "").frames) == (0, 11)
    assert kv.match(TOKENS, "another tenant").frames == 0


def test_what_has_not_come_is_not_found() -> None:
    kv, transit = pool(64)
    transit.reserve("r", TOKENS, "", spare=0)
    bring(transit, "r", 32)
    transit.place("r", 88)
    transit.release("r")
    assert kv.match(TOKENS, "").frames == 4
    assert kv.n_free == 60


def test_only_what_is_missing_is_brought() -> None:
    kv, transit = pool(64)
    compute(kv, TOKENS, 45)
    assert transit.reserve("r", TOKENS, "", spare=0) == 40
    place = transit.place("r", 64)
    assert place is not None
    assert (place.start, place.stop, [len(frames) for frames in place.frames]) == (40, 64, [3])


def test_a_reservation_keeps_frames_for_the_whole_prompt_and_a_token() -> None:
    kv, transit = pool(12 + 5)
    assert transit.reserve("r", TOKENS, "", spare=0) == 0
    assert kv.available == 5
    assert transit.reserve("second", [7, *TOKENS], "", spare=0) is None
    assert transit.reserve("short", [7] * 30, "", spare=2) is None
    assert transit.reserve("short", [7] * 30, "", spare=1) == 0


def test_of_a_window_only_what_the_next_row_looks_at_is_brought() -> None:
    kv, transit = pool(200, Whole(), Window(20))
    transit.reserve("r", TOKENS, "", spare=0)
    place = transit.place("r", 64)
    assert place is not None
    assert [sum(frame >= 0 for frame in frames) for frames in place.frames] == [8, 3]
    assert place.frames[1][:5] == (-1,) * 5
    transit.land("r", 64)
    bring(transit, "r", 88)
    transit.release("r")
    kv.check_integrity()
    assert kv.match(TOKENS, "").frames == 11
    assert kv.match(TOKENS[:70], "").frames == 8
    assert kv.match(TOKENS[:60], "").frames == 0, "what a row there looks at never came"


def test_a_lease_names_the_frames_and_keeps_them() -> None:
    kv, transit = pool(14)
    compute(kv, TOKENS, 88)
    place = transit.lease("l", TOKENS, "", 32, 80)
    assert place is not None
    assert (place.start, place.stop, len(place.frames[0])) == (32, 80, 6)
    assert kv.n_held == 10
    compute(kv, [1] * 40, 32)
    assert kv.match(TOKENS, "").frames >= 10, "what is leased was evicted"
    transit.release("l")
    transit.release("l")
    assert kv.n_held == 0


def test_what_is_not_there_cannot_be_leased() -> None:
    kv, transit = pool(32)
    compute(kv, TOKENS, 40)
    assert transit.lease("l", TOKENS, "", 0, 48) is None
    assert transit.lease("l", TOKENS, "another tenant", 0, 40) is None
    assert (kv.n_held, len(transit)) == (0, 0)


def test_the_youngest_gives_way_first_and_it_is_known_which() -> None:
    kv, transit = pool(64)
    compute(kv, TOKENS, 88)
    transit.lease("old", TOKENS, "", 0, 40)
    transit.reserve("young", [5] * 50, "", spare=0)
    assert transit.give_way(leases=True)
    assert ("old" in transit, "young" in transit, transit.lost) == (True, False, ["young"])
    assert transit.give_way(leases=True)
    assert not transit.give_way(leases=True)
    assert transit.lost == ["young", "old"]
    kv.check_integrity()
    assert kv.n_held == 0


def test_leases_can_be_spared() -> None:
    kv, transit = pool(64)
    compute(kv, TOKENS, 88)
    transit.reserve("old", [5] * 50, "", spare=0)
    transit.lease("young", TOKENS, "", 0, 40)
    assert transit.give_way(leases=False)
    assert not transit.give_way(leases=False)
    assert ("young" in transit, transit.lost) == (True, ["old"])


def test_who_waits_while_nobody_runs_does_not_wait_for_reservations() -> None:
    """What they wait for may be computed by an engine that waits for this one in the same way."""
    kv, transit = pool(12)
    scheduler = Scheduler(kv, Limits(4, 32), transit.give_way)
    transit.reserve("r", TOKENS[:64], "", spare=0)
    scheduler.add(Sequence("s", 0, list(range(60)), SamplingParams(max_tokens=4), seed=0))
    assert scheduler.schedule(0.0) is not None
    assert transit.lost == ["r"]


def test_who_waits_while_nobody_runs_waits_for_leases() -> None:
    kv, transit = pool(12)
    scheduler = Scheduler(kv, Limits(4, 32), transit.give_way)
    compute(kv, TOKENS, 72)
    transit.lease("l", TOKENS, "", 0, 64)
    scheduler.add(Sequence("s", 0, list(range(60)), SamplingParams(max_tokens=4), seed=0))
    assert scheduler.schedule(0.0) is None
    transit.release("l")
    assert scheduler.schedule(0.0) is not None


def test_the_end_of_a_reservation_stops_who_writes_and_waits_for_it() -> None:
    _, transit = pool(64)
    transit.reserve("r", TOKENS, "", spare=0)
    gate = transit.gate("r")
    told, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (transit.release("r"), ended.set()))
    with gate:
        assert gate.open
        gate.interrupt = told.set
        thread.start()
        assert told.wait(10)
        assert not gate.open
        assert not ended.is_set(), "it must wait for the writer"
    assert ended.wait(10)
    thread.join()


@pytest.mark.parametrize(("start", "stop"), [(4, 16), (0, 12)])
def test_a_lease_is_of_whole_frames(start: int, stop: int) -> None:
    kv, transit = pool(32)
    compute(kv, TOKENS, 40)
    with pytest.raises(AssertionError, match="whole frames"):
        transit.lease("l", TOKENS, "", start, stop)


def test_a_lease_takes_no_frames_that_are_promised_to_who_runs() -> None:
    """What has fallen out of a window can still be found, and is leased, as long as nobody is to have it."""
    kv, transit = pool(24, Whole(), Window(8))
    kv.acquire("a", TOKENS, "")
    assert kv.reserve("a", 48)
    kv.commit("a", TOKENS, 39)
    assert kv.n_cached > 0
    assert transit.lease("l", TOKENS, "", 0, 32) is not None
    transit.release("l")
    kv.acquire("b", others := TOKENS[::-1], "")
    goal = next(tokens for tokens in range(8, 400, 8) if kv.fresh(kv.match(others, ""), tokens, 8) == kv.available)
    kv.promise("b", goal, 8)
    assert kv.available == 0
    assert transit.lease("l", TOKENS, "", 0, 32) is None
    kv.check_integrity()
