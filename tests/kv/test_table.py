"""The page table against a plain list of frames."""

import itertools
import random

import numpy as np
import pytest

from tokenmill.kv.table import PageTable, runs


def listed(table: PageTable) -> list[int]:
    """The frames as a kernel reads them: from the arrays alone."""
    ends = [*table.starts[1:], table.n_frames]
    extents = zip(table.first, table.starts, ends, strict=False)
    return [first + at if first >= 0 else -1 for first, start, end in extents for at in range(end - start)]


def test_random_holes_agree_with_a_list_of_frames() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        table, twin = PageTable(), list[int]()
        for _ in range(150):
            kind = rng.random()
            if kind < 0.4 or not twin:
                first, count = rng.choice((-1, 0, 1, rng.randrange(1000))), rng.randint(1, 8)
                table.append(first, count)
                twin += [-1] * count if first < 0 else range(first, first + count)
            elif kind < 0.8:
                start = rng.randrange(len(twin))
                stop = rng.randint(start + 1, min(len(twin), start + 12))
                table.punch(start, stop)
                twin[start:stop] = [-1] * (stop - start)
            elif kind < 0.9:
                keep = rng.randint(len(twin) // 2, len(twin))
                table.truncate(keep)
                del twin[keep:]
            else:
                start = rng.randrange(len(twin))
                frames = [rng.choice((-1, 5, 6)) for _ in range(rng.randint(1, min(6, len(twin) - start)))]
                table.replace(start, frames)
                twin[start : start + len(frames)] = frames
            assert listed(table) == twin, f"seed {seed}"
            assert (table.n_frames, table.n_holes, table.present) == (len(twin), twin.count(-1), len(twin) - twin.count(-1)), f"seed {seed}"
            extents = list(zip(table.first, [*table.starts[1:], table.n_frames], table.starts, strict=True))
            joined = [b[0] == -1 if a[0] == -1 else b[0] == a[0] + a[1] - a[2] for a, b in itertools.pairwise(extents)]
            assert not any(joined), f"neighbours are not one extent, seed {seed}"
            start = rng.randint(0, len(twin))
            stop = rng.randint(start, len(twin))
            assert table.frames(start, stop) == twin[start:stop], f"seed {seed}"
            held = [at for begin, end in table.held(start, stop) for at in range(begin, end)]
            assert held == [at for at in range(start, stop) if twin[at] >= 0], f"seed {seed}"


def test_a_window_that_slides_stays_one_hole_and_its_extents() -> None:
    table = PageTable()
    table.append(0, 100)
    for at in range(90):
        table.punch(at, at + 1)
        assert (list(table.first), list(table.starts)) == ([-1, at + 1], [0, at + 1])


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
