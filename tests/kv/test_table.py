"""The page table against a plain list of frames."""

import random

import numpy as np
import pytest

from tokenmill.kv.table import PageTable, runs


def listed(table: PageTable) -> list[int]:
    """The frames as a kernel reads them: from the arrays alone."""
    ends = [*table.starts[1:], table.n_frames]
    return [first + offset for first, start, end in zip(table.first, table.starts, ends, strict=False) for offset in range(end - start)]


@pytest.mark.parametrize("seed", range(40))
def test_random_edits_agree_with_a_list_of_frames(seed: int) -> None:
    rng = random.Random(seed)
    table, twin = PageTable(), list[int]()
    for _ in range(200):
        kind = rng.random()
        if kind < 0.6:
            first = twin[-1] + 1 if twin and rng.random() < 0.4 else rng.randrange(1000)
            count = rng.randint(1, 8)
            table.append(first, count)
            twin += range(first, first + count)
        elif kind < 0.75:
            keep = rng.randint(0, len(twin))
            table.truncate(keep)
            del twin[keep:]
        elif twin:
            start = rng.randrange(len(twin))
            frames = [rng.randrange(1000) for _ in range(rng.randint(1, min(6, len(twin) - start)))]
            table.replace(start, frames)
            twin[start : start + len(frames)] = frames
        assert listed(table) == twin, f"seed {seed}"
        assert table.n_frames == len(twin)
        assert len(table.first) == len(list(runs(twin))), "neighbours are not one extent"
        start = rng.randint(0, len(twin))
        stop = rng.randint(start, len(twin))
        assert table.frames(start, stop) == twin[start:stop], f"seed {seed}"


def test_arrays_are_int32_and_starts_ascend() -> None:
    table = PageTable()
    for first in range(0, 400, 4):
        table.append(first, 2)
    assert table.first.itemsize == table.starts.itemsize == np.dtype(np.int32).itemsize
    assert len(table.first) == 100
    assert table.starts.tolist() == list(range(0, 200, 2))


def test_extending_the_last_extent_writes_no_new_one() -> None:
    table = PageTable()
    table.append(4, 4)
    table.append(8, 8)
    assert (len(table.first), table.n_frames) == (1, 12)


def test_reading_past_the_end_is_refused() -> None:
    table = PageTable()
    table.append(0, 2)
    with pytest.raises(AssertionError, match="of a table of 2"):
        table.frames(0, 3)
    with pytest.raises(AssertionError, match="cannot cut"):
        table.truncate(3)
