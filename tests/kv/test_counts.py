"""Pages by size and state, against a twin that remembers every page that was handed out."""

import random

import pytest

from tokenmill.core.messages import PageCounts
from tokenmill.core.types import FRAME
from tokenmill.kv.buddy import BuddyAllocator
from tokenmill.kv.counts import count_pages
from tokenmill.kv.table import HOLE, PageTable


def expected(pool: BuddyAllocator, pages: list[tuple[int, set[int]]], tables: list[PageTable]) -> dict[int, PageCounts]:
    """pages: the size of each and those of its frames that have not come back."""
    holders: dict[int, int] = {}
    for table in tables:
        for frame in table.frames(0, table.n_frames):
            if frame != HOLE:
                holders[frame] = holders.get(frame, 0) + 1
    found = {}
    for size in (1, 2, 4, 8):
        mine = [frames for of_size, frames in pages if of_size == size and frames]
        used = sum(any(holders.get(frame) for frame in frames) for frames in mine)
        shared = sum(any(holders.get(frame, 0) > 1 for frame in frames) for frames in mine)
        free = sum(1 for _, of_size in pool.free_pages() if of_size == size)
        found[size * FRAME] = PageCounts(free, used, len(mine) - used, shared)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_pages_are_counted_as_they_were_handed_out(seed: int) -> None:
    rng = random.Random(seed)
    pool = BuddyAllocator(rng.randint(1, 90))
    tables = [PageTable() for _ in range(4)]
    pages: list[tuple[int, set[int]]] = []
    for _ in range(150):
        if pool.n_free and rng.random() < 0.5:
            first, count = pool.allocate(rng.choice((1, 2, 4, 8)))
            pages.append((count, set(range(first, first + count))))
            for table in rng.sample(tables, rng.randint(0, 3)):
                start = rng.randrange(count)
                table.append(first + start, rng.randint(1, count - start))
                if rng.random() < 0.2:
                    table.append(HOLE, 1)
        elif pages:
            referenced = {frame for table in tables for frame in table.frames(0, table.n_frames)}
            loose = [frame for _, frames in pages for frame in frames - referenced]
            if loose and rng.random() < 0.7:
                frame = rng.choice(loose)
                pool.free(frame, 1)
                for _, frames in pages:
                    frames.discard(frame)
            else:
                table = rng.choice(tables)
                table.truncate(rng.randint(0, table.n_frames))
        assert count_pages(pool, tables) == expected(pool, pages, tables), f"seed {seed}"
    assert any(frames for _, frames in pages), f"seed {seed}"
