"""Who joins or leaves does so everywhere; and the parts together, under a load with hangs, deaths and restarts."""

from __future__ import annotations

import random

import pytest
from workers import worker

from tokenmill.cluster.fleet import Fleet
from tokenmill.cluster.health import State
from tokenmill.cluster.router import RouterPolicy
from tokenmill.cluster.separation import SeparationPolicy
from tokenmill.cluster.strategies import RouteRequest
from tokenmill.core.blocks import block_hashes
from tokenmill.core.clock import ManualClock
from tokenmill.core.roles import Role

REQUEST = RouteRequest(model="m", prompt_tokens=1024, hashes=block_hashes([1] * 1024, "", "f"), session="s")


def used(fleet: Fleet, name: str) -> None:
    """Leave a trace of a worker everywhere."""
    for other in ("other", name):
        attempt = fleet.breakers.begin((name, other))
        for _ in range(2):
            fleet.breakers.failed(attempt)
    for _ in range(3):
        fleet.breakers.failed(fleet.breakers.begin(name))
    fleet.loads.give("part", name, Role.MIXED, prompt_tokens=1024)
    fleet.prefixes.add(name, REQUEST.hashes)
    fleet.separation.observe_prefill(name, 100, 10.0)
    fleet.separation.observe_transfer(name, "other", 100, 10.0)


@pytest.mark.parametrize("how", ["leaves", "joins again", "is replaced"])
def test_nothing_remains_of_a_process_that_is_gone(how: str) -> None:
    fleet = Fleet(ManualClock())
    assert fleet.join(worker("w", boot="first")) == []
    assert fleet.router.choose(REQUEST, Role.MIXED).found().id == "w"
    used(fleet, "w")
    match how:
        case "leaves":
            assert fleet.leave("w", "first") == ["part"]
            assert fleet.state("w") is State.GONE
            assert fleet.router._turns[Role.MIXED] == {}
            fleet.join(worker("w", boot="second"))
        case "joins again":
            assert fleet.join(worker("w", boot="first")) == ["part"]
        case "is replaced":
            fleet.health.ended("w", "first")
            assert fleet.join(worker("w", boot="second")) == ["part"]
            assert fleet.leave("w", "first") == [], "the end of the old process comes late"
    assert fleet.state("w") is State.HEALTHY
    assert fleet.breakers.circuit("w") == "closed"
    assert len(fleet.breakers._breakers) == 0
    assert (len(fleet.prefixes), len(fleet.loads), fleet.loads.by_worker["w"].kv_tokens) == (0, 0, 0)
    assert fleet.separation.prefill_speed("w") is None
    assert list(fleet.separation._transfer) == []
    assert fleet.router._turns[Role.MIXED] == {}
    assert fleet.router.choose(REQUEST, Role.MIXED).found().id == "w"


def test_a_tick_judges_workers_by_the_work_that_they_were_given() -> None:
    clock = ManualClock()
    fleet = Fleet(clock)
    for name in ("busy", "idle", "waiting"):
        fleet.join(worker(name))
    fleet.loads.give(1, "busy", Role.MIXED, prompt_tokens=20)
    fleet.loads.give(2, "waiting", Role.DECODE, prompt_tokens=20)
    changes = []
    for _ in range(12):
        clock.advance(1)
        changes += fleet.tick()
        for name in fleet.health.to_ask():
            fleet.health.counted(name, "first", 0)
    assert [(change.worker_id, change.after) for change in changes] == [("busy", State.SUSPECT), ("busy", State.UNHEALTHY)]
    assert fleet.router.choose(REQUEST, Role.MIXED, excluded={"idle"}).found().id == "waiting"


def test_a_tick_gives_a_long_step_the_time_that_was_measured() -> None:
    clock = ManualClock()
    fleet = Fleet(clock)
    for name in ("slow", "fast"):
        fleet.join(worker(name, chunk_size=256))
        fleet.loads.give(name, name, Role.PREFILL, prompt_tokens=10_000)
    fleet.separation.observe_prefill("slow", 256, 25.6)
    fleet.separation.observe_prefill("fast", 2560, 1.0)
    for _ in range(20):
        clock.advance(1)
        fleet.tick()
    assert (fleet.state("slow"), fleet.state("fast")) == (State.HEALTHY, State.UNHEALTHY)


def test_the_decision_to_separate_sees_what_both_workers_have() -> None:
    fleet = Fleet(ManualClock(), separation=SeparationPolicy(handover_seconds=0.01))
    fleet.join(worker("p", Role.PREFILL))
    fleet.join(worker("d", Role.DECODE))
    assert not fleet.decide(REQUEST, "p", "d", 1000).separate
    for number in range(5):
        fleet.loads.give(number, "d", Role.DECODE, prompt_tokens=100)
    assert fleet.decide(REQUEST, "p", "d", 1000).separate
    fleet.prefixes.add("d", REQUEST.hashes)
    assert fleet.decide(REQUEST, "p", "d", 1000).reason == "only 0 tokens of its prompt are to be computed"
    fleet.prefixes.leave("d")
    fleet.loads.give("much", "p", Role.PREFILL, prompt_tokens=20_000)
    assert not fleet.decide(REQUEST, "p", "d", 1000).separate


@pytest.mark.parametrize("seed", range(10))
def test_under_hangs_deaths_and_restarts_no_request_is_lost_or_counted_twice(seed: int) -> None:
    """Each request is on one worker or waits to be given; who was moved from a worker is not there any more."""
    rng = random.Random(seed)
    clock = ManualClock(50.0)
    fleet = Fleet(clock, router=RouterPolicy(routing_strategy=rng.choice(["min_decode_queue", "prefix_aware", "power_of_two"])))
    boots = {f"w{number}": 0 for number in range(5)}
    hung: set[str] = set()
    for name in boots:
        fleet.join(worker(name, boot="0"))
    homeless, number, moved, done = [], 0, 0, 0
    for _ in range(400):
        clock.advance(1)
        for _ in range(rng.randrange(4)):
            homeless.append(number)
            number += 1
        for name in fleet.health.to_ask():
            if name not in hung:
                fleet.health.counted(name, str(boots[name]), int(clock.now()), idle=True)
        for change in fleet.tick():
            if change.after is State.UNHEALTHY:
                assert change.worker_id in hung, f"seed {seed}"
                for key in list(fleet.loads.by_worker[change.worker_id].parts):
                    fleet.loads.end(key)
                    homeless.append(key)
                    moved += 1
        name = rng.choice(list(boots))
        if rng.random() < 0.03:
            hung.add(name)
        if rng.random() < 0.05:
            lost = fleet.leave(name, str(boots[name]))
            homeless += lost
            moved += len(lost)
            boots[name] += 1
            hung.discard(name)
            homeless += fleet.join(worker(name, boot=str(boots[name])))
        for key in list(homeless):
            request = RouteRequest(model="m", prompt_tokens=256, hashes=block_hashes([key % 7] * 256, "", "f"))
            choice = fleet.router.choose(request, Role.MIXED)
            if choice.worker is not None:
                fleet.loads.give(key, choice.worker.id, Role.MIXED, prompt_tokens=256)
                fleet.prefixes.add(choice.worker.id, request.hashes)
                homeless.remove(key)
        for worker_id in boots:
            if worker_id not in hung:
                for key in list(fleet.loads.by_worker[worker_id].parts)[:2]:
                    assert fleet.loads.end(key)
                    done += 1
        there = [key for worker_id in boots for key in fleet.loads.by_worker[worker_id].parts]
        assert len(there) == len(set(there)) == len(fleet.loads)
        assert len(there) + len(homeless) + done == number, f"seed {seed}"
    assert moved > 5, f"seed {seed}: nothing happened"
    assert done > 100
