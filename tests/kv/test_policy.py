"""Page sizes."""

import itertools

import pytest

from tokenmill.core.config import BlockManagerConfig
from tokenmill.kv.groups import KVGroup, Whole
from tokenmill.kv.manager import KVManager
from tokenmill.kv.policy import page_frames


def pages(need: int, spare: int, context: int, smallest: int = 1, largest: int = 8) -> list[int]:
    taken = []
    while need > 0:
        taken.append(page_frames(need, spare, context, smallest, largest))
        spare -= max(0, taken[-1] - need)
        need -= taken[-1]
    return taken


def test_a_run_of_known_length_gets_the_largest_pages_that_fit() -> None:
    assert pages(need=63, spare=100, context=500) == [8] * 7 + [4, 2, 1]


@pytest.mark.parametrize(("context", "page"), [(1, 1), (511, 1), (512, 2), (1023, 2), (1024, 4), (4095, 4), (4096, 8), (10**6, 8)])
def test_growth_follows_the_context(context: int, page: int) -> None:
    assert page_frames(1, 100, context, 1, 8) == page


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 4), (2, 8), (4, 4), (8, 8)])
def test_configured_bounds_hold_when_there_is_room(smallest: int, largest: int) -> None:
    for need, context in itertools.product(range(1, 40), (1, 2000, 20_000)):
        page = page_frames(need, 100, context, smallest, largest)
        assert smallest <= page <= largest
        assert page <= max(need, smallest, 8 if context >= 4096 else 4)


def test_a_tight_pool_never_gives_more_than_need_and_spare() -> None:
    for need, spare, smallest in itertools.product(range(1, 20), range(9), (1, 2, 4, 8)):
        assert page_frames(need, spare, 20_000, smallest, 8) <= need + spare
    assert page_frames(1, 0, 20_000, 8, 8) == 1


def test_block_size_sets_the_pages_that_a_growing_sequence_takes() -> None:
    for block_size in (8, 16, 32, 64):
        manager = KVManager([KVGroup("all", Whole(), ((0, 0),))], 64, BlockManagerConfig(block_size=block_size))
        manager.acquire("a", [1, 2, 3], "")
        manager.reserve("a", 4)
        assert manager.covered("a") == block_size
