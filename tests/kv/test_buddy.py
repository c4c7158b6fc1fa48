"""The buddy allocator against a slow twin that looks for pages in a plain array of owners."""

import random

import pytest

from tokenmill.kv.buddy import MAX_PAGE, BuddyAllocator

SIZES = (1, 2, 4, 8)


class SlowBuddy:
    """Remembers per frame whether it is free; a page is any aligned free stretch inside an aligned free block."""

    def __init__(self, n_frames: int) -> None:
        self.free_frame = [True] * n_frames

    def pages(self) -> list[tuple[int, int]]:
        """The coalesced free pages: greedily the largest aligned stretch at each position."""
        pages, at = [], 0
        while at < len(self.free_frame):
            for size in reversed(SIZES):
                if at % size == 0 and at + size <= len(self.free_frame) and all(self.free_frame[at : at + size]):
                    pages.append((at, size))
                    at += size
                    break
            else:
                at += 1
        return pages

    def best(self, wanted: int) -> int:
        """The page size that a request for `wanted` frames must get."""
        return min(wanted, max(size for _, size in self.pages()))

    def mark(self, first: int, count: int, free: bool) -> None:
        for frame in range(first, first + count):
            assert self.free_frame[frame] != free, f"frame {frame} is already {'free' if free else 'taken'}"
            self.free_frame[frame] = free


@pytest.mark.parametrize("seed", range(40))
def test_random_allocations_and_partial_frees_agree_with_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    n_frames = rng.randint(1, 70)
    pool, twin = BuddyAllocator(n_frames), SlowBuddy(n_frames)
    taken: list[int] = []
    for _ in range(300):
        if pool.n_free and rng.random() < 0.55:
            wanted = rng.choice(SIZES)
            expected = twin.best(wanted)
            first, count = pool.allocate(wanted)
            assert count == expected, f"seed {seed}"
            assert first % count == 0, f"seed {seed}"
            twin.mark(first, count, free=False)
            taken += range(first, first + count)
        elif taken:
            start = rng.choice(taken)
            count = 1
            while count < rng.randint(1, 12) and start + count in taken:
                count += 1
            pool.free(start, count)
            twin.mark(start, count, free=True)
            taken = [frame for frame in taken if not start <= frame < start + count]
        assert pool.n_free == sum(twin.free_frame)
        assert pool.free_pages() == twin.pages(), f"seed {seed}"
        pool.check_integrity()


def test_a_fresh_pool_gives_neighbouring_pages_in_ascending_order() -> None:
    pool = BuddyAllocator(32)
    assert [pool.allocate(8) for _ in range(4)] == [(0, 8), (8, 8), (16, 8), (24, 8)]


def test_without_a_page_of_the_wanted_size_the_largest_smaller_one_is_given() -> None:
    pool = BuddyAllocator(11)  # 8 + 2 + 1
    assert pool.allocate(8) == (0, 8)
    assert pool.allocate(8) == (8, 2)
    assert pool.allocate(4) == (10, 1)
    assert pool.n_free == 0


def test_the_smallest_sufficient_page_is_split() -> None:
    pool = BuddyAllocator(14)  # 8 + 4 + 2
    assert pool.allocate(2) == (12, 2)
    assert pool.allocate(1) == (8, 1)
    assert pool.free_pages() == [(0, 8), (9, 1), (10, 2)]


def test_a_page_that_comes_back_frame_by_frame_is_whole_again() -> None:
    pool = BuddyAllocator(MAX_PAGE)
    pool.allocate(MAX_PAGE)
    for frame in (3, 0, 7, 1, 2, 6, 5, 4):
        pool.free(frame, 1)
    assert pool.free_pages() == [(0, MAX_PAGE)]


def test_a_double_free_is_noticed() -> None:
    pool = BuddyAllocator(8)
    pool.allocate(1)
    pool.allocate(1)
    pool.free(0, 1)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(0, 1)


def test_frames_outside_the_pool_are_refused() -> None:
    with pytest.raises(AssertionError, match="of a pool of 8"):
        BuddyAllocator(8).free(6, 4)


def test_an_unjoined_pair_fails_the_integrity_check() -> None:
    pool = BuddyAllocator(8)
    pool._free[3].clear()
    pool._free[2].update({0: None, 4: None})
    with pytest.raises(AssertionError, match="not joined"):
        pool.check_integrity()
