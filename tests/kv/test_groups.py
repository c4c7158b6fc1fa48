"""KV groups describe a model's heads without contradiction, and equal room divides them with little waste."""

import itertools
import random

import pytest

from tokenmill.core.types import Pair, Streaming
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window, check_groups, divide


def pairs(layers: range | list[int], heads: int = 1) -> list[Pair]:
    return [(layer, head) for layer in layers for head in range(heads)]


def sizes(groups: tuple[KVGroup, ...]) -> list[tuple[Retention, int]]:
    return [(group.retention, len(group.pairs)) for group in groups]


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [KVGroup("whole", Whole(), ())],
        [KVGroup("same", Whole(), ((0, 0),)), KVGroup("same", Window(8), ((1, 0),))],
        [KVGroup("whole", Whole(), ((0, 0), (1, 0))), KVGroup("window", Window(8), ((1, 0),))],
        [KVGroup("a", Streaming(0, 8), ((0, 0),)), KVGroup("b", Streaming(16, 8), ((1, 0),))],
    ],
)
def test_contradictions_are_our_own_fault(groups: list[KVGroup]) -> None:
    with pytest.raises(AssertionError):
        check_groups(groups)


def test_rules_have_possible_numbers() -> None:
    with pytest.raises(AssertionError, match="0 tokens"):
        Window(0)
    with pytest.raises(AssertionError, match="multiple of 16"):
        Streaming(8, 64)
    with pytest.raises(AssertionError, match="multiple of 8"):
        Streaming(16, 60)


def test_a_plain_model_is_one_group() -> None:
    assert sizes(divide({Whole(): pairs(range(24), 2)})) == [(Whole(), 48)]


def test_gemma_is_six_groups_of_three_layers() -> None:
    whole = [5, 11, 17]
    window = [layer for layer in range(18) if layer not in whole]
    groups = divide({Window(512): pairs(window), Whole(): pairs(whole)})
    assert sizes(groups) == [(Whole(), 3), *[(Window(512), 3)] * 5]
    check_groups(groups)


def test_streaming_heads_fill_their_groups_and_the_first_of_the_rest_stay_whole() -> None:
    everything = pairs(range(20), 5)
    streaming = everything[:31]
    groups = divide({Whole(): everything[31:], Streaming(16, 64): streaming})
    kept = {pair for group in groups if group.retention == Whole() for pair in group.pairs}
    moved = [pair for pair in streaming if pair in kept]
    assert moved == streaming[: len(moved)]
    assert len(moved) + max(len(g.pairs) for g in groups) * len(groups) - 100 <= 3


@pytest.mark.parametrize("seed", range(40))
def test_no_group_is_larger_than_another_by_more_than_waste_allows(seed: int) -> None:
    rng = random.Random(seed)
    everything = pairs(range(rng.randint(1, 12)), rng.randint(1, 4))
    rng.shuffle(everything)
    cuts = sorted(rng.randint(0, len(everything)) for _ in range(2))
    rules = {Whole(): everything[: cuts[0]], Streaming(16, 64): everything[cuts[0] : cuts[1]], Window(32): everything[cuts[1] :]}
    groups = check_groups(divide(rules))
    assert sorted(itertools.chain(*(group.pairs for group in groups))) == sorted(everything)
    room = max(len(group.pairs) for group in groups)
    moved = sum(len(group.pairs) for group in groups if group.retention == Whole()) - cuts[0]
    assert moved >= 0
    assert len(groups) * room - len(everything) + moved <= 0.03 * len(everything)
