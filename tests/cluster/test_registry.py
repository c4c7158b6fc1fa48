"""Who is there, and who may get something new."""

from __future__ import annotations

import random

import pytest
from workers import worker

from tokenmill.cluster.registry import Registry, Worker
from tokenmill.core.errors import ConfigError
from tokenmill.core.roles import Role

TAKES = {
    Role.PREFILL: {Role.PREFILL, Role.MIXED},
    Role.DECODE: {Role.DECODE, Role.MIXED},
    Role.MIXED: {Role.DECODE, Role.MIXED},
}
"""Work -> the roles that take it."""


def ids(workers: tuple[Worker, ...] | list[Worker]) -> list[str]:
    return [one.id for one in workers]


def test_a_worker_is_found_by_its_model_and_by_what_its_role_takes() -> None:
    registry = Registry()
    for model in ("m", "other"):
        for role in Role:
            registry.join(worker(f"{model}-{role}", role, model=model))
    assert ids(registry.takers("m", Role.PREFILL)) == ["m-prefill", "m-mixed"]
    assert ids(registry.takers("m", Role.DECODE)) == ["m-decode", "m-mixed"]
    assert ids(registry.takers("other", Role.MIXED)) == ["other-decode", "other-mixed"]
    assert registry.takers("unknown", Role.DECODE) == ()
    assert registry.models() == ["m", "other"]


def test_a_draining_worker_gets_nothing_new_but_is_still_there() -> None:
    registry = Registry()
    registry.join(worker("a"))
    registry.join(worker("b"))
    assert registry.drain("a")
    assert ids(registry.takers("m", Role.MIXED)) == ["b"]
    assert ids(registry.of_role("m", Role.MIXED)) == ["a", "b"]
    assert (registry.is_draining("a"), registry.is_draining("b")) == (True, False)
    assert not registry.drain("nobody")
    assert not registry.is_draining("nobody")


def test_a_process_that_connects_again_goes_on_draining_and_a_new_one_does_not() -> None:
    registry = Registry()
    first = worker("a", boot="first")
    assert registry.join(first) is None
    registry.drain("a")
    assert registry.join(first) == first
    assert registry.is_draining("a")
    assert registry.join(worker("a", boot="second")) == first
    assert not registry.is_draining("a")
    assert ids(registry.takers("m", Role.MIXED)) == ["a"]


def test_late_news_of_the_end_of_a_process_does_not_remove_the_next_one() -> None:
    registry = Registry()
    registry.join(worker("a", boot="first"))
    second = worker("a", boot="second")
    registry.join(second)
    assert registry.leave("a", "first") is None
    assert registry.get("a") == second
    assert registry.leave("a", "second") == second
    assert registry.leave("a", "second") is None
    assert len(registry) == 0


def test_a_worker_that_comes_back_as_another_has_only_its_new_place() -> None:
    registry = Registry()
    registry.join(worker("a", Role.PREFILL))
    assert ids(registry.takers("m", Role.PREFILL)) == ["a"]
    registry.join(worker("a", Role.DECODE, model="other", boot="second"))
    assert registry.takers("m", Role.PREFILL) == ()
    assert ids(registry.takers("other", Role.DECODE)) == ["a"]


def test_a_drained_worker_that_has_left_does_not_drain_when_it_joins_again() -> None:
    registry = Registry()
    registry.join(worker("a"))
    registry.drain("a")
    registry.leave("a", "first")
    registry.join(worker("a"))
    assert ids(registry.takers("m", Role.MIXED)) == ["a"]


def test_models_that_callers_make_up_are_not_remembered() -> None:
    registry = Registry()
    registry.join(worker("a"))
    for number in range(1000):
        registry.takers(f"made up {number}", Role.MIXED)
    assert len(registry._takers) == 0


@pytest.mark.parametrize("field", ["id", "model", "boot"])
def test_a_worker_without_a_name_model_or_boot_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"without {field}"):
        worker(**{"worker_id" if field == "id" else field: ""})


@pytest.mark.parametrize("field", ["max_model_len", "max_batch_size", "kv_tokens", "chunk_size"])
def test_a_worker_that_can_hold_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"worker w0: {field} is 0, but must be at least 1"):
        worker(**{field: 0})


@pytest.mark.parametrize("seed", range(20))
def test_random_joins_leaves_and_drains_agree_with_plain_lists(seed: int) -> None:
    rng = random.Random(seed)
    registry, twin, draining = Registry(), list[Worker](), set[str]()
    for step in range(300):
        name, boot = f"w{rng.randrange(6)}", f"b{rng.randrange(3)}"
        present = next((one for one in twin if one.id == name), None)
        match rng.randrange(4):
            case 0 | 1:
                new = worker(name, rng.choice(list(Role)), model=rng.choice("mn"), boot=boot)
                assert registry.join(new) == present
                if present is None:
                    twin.append(new)
                else:
                    twin[twin.index(present)] = new
                    draining -= {name} if present.boot != boot else set()
            case 2:
                left = registry.leave(name, boot)
                assert left == (present if present and present.boot == boot else None), f"seed {seed}"
                if left:
                    twin.remove(left)
                    draining.discard(name)
            case 3:
                assert registry.drain(name) == (present is not None)
                draining |= {name} if present else set()
        assert list(registry) == twin, f"seed {seed}, step {step}"
        for model in "mn":
            for wanted in Role:
                fitting = [one for one in twin if one.model == model and one.role in TAKES[wanted]]
                takers = [one for one in fitting if one.id not in draining]
                assert registry.of_role(model, wanted) == fitting, f"seed {seed}, step {step}"
                assert list(registry.takers(model, wanted)) == takers, f"seed {seed}, step {step}"
