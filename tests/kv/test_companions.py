"""Companions of the tree's keys against a list of references."""

import random

import pytest

from tokenmill.kv.companions import Companions


@pytest.mark.parametrize("seed", range(30))
def test_random_use_agrees_with_a_list_of_references(seed: int) -> None:
    rng = random.Random(seed)
    companions = Companions()
    frames: dict[int, tuple[int, ...]] = {}
    references: list[int] = []
    idle: list[int] = []  # in the order in which they became so
    tick = 0
    for number in range(400):
        kind, key = rng.random(), rng.randrange(12)
        tick += rng.randrange(2)
        if kind < 0.3:
            offered = (2 * number, 2 * number + 1)
            assert companions.put(key, offered) == frames.setdefault(key, offered), f"seed {seed}"
            references.append(key)
        elif kind < 0.45 and key in frames:
            assert companions.ref([key]) == [frames[key]], f"seed {seed}"
            references.append(key)
        elif kind < 0.8 and references:
            key = references.pop(rng.randrange(len(references)))
            assert companions.unref([key], tick) == (key not in references), f"seed {seed}"
            if key not in references:
                idle.append(key)
        elif kind < 0.9 and idle:
            assert companions.evict() == frames.pop(idle.pop(0)), f"seed {seed}"
        elif key not in references:
            assert companions.forget(key) == frames.pop(key, ()), f"seed {seed}"
            idle = [other for other in idle if other != key]
        idle = [other for other in idle if other not in references]
        companions.check_integrity({key: references.count(key) for key in references})
        assert companions.n_idle == len(idle)
        assert companions.n_shared == sum(references.count(key) > 1 for key in frames)
        assert {key: kept for key, kept, _ in companions.items()} == frames
        assert companions.idle_among(frames) == len(idle)
        assert companions.sole_among(frames) == sum(references.count(key) == 1 for key in frames)


def slow_reach(there: list[bool], window: int | None) -> int:
    for end in range(len(there), -1, -1):
        if all(there[0 if window is None else max(0, end - window) : end]):
            return end
    raise AssertionError


@pytest.mark.parametrize("seed", range(60))
def test_a_hit_is_the_longest_with_all_that_its_next_row_sees(seed: int) -> None:
    rng = random.Random(seed)
    companions = Companions()
    there = [rng.random() < 0.85 for _ in range(rng.randint(0, 40))]
    keys = [100 + at for at in range(len(there))]
    for key, present in zip(keys, there, strict=True):
        if present:
            companions.put(key, (key,))
    for window in (None, 0, 1, 3, 7, 50):
        assert companions.reach(keys, len(keys), window) == slow_reach(there, window), f"seed {seed}, window {window}"


def test_evicting_from_the_front_does_not_search() -> None:
    """An ordinary dict would step over all that was evicted before, every time."""
    companions = Companions()
    for key in range(60_000):
        companions.put(key, (key,))
    companions.unref(range(60_000), 1)
    assert [companions.evict() for _ in range(60_000)] == [(key,) for key in range(60_000)]
