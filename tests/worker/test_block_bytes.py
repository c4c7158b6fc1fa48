"""A block's frames as bytes: whoever has some of them takes the rest, and nothing is written that is not wanted."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from tokenmill.engine.filling import FRAMES
from tokenmill.kernels.frames import Geometry, KVMemory
from tokenmill.worker.block_bytes import HOLE, BlockBytes

SLOTS = (3, 2, 2)
WINDOWS = (None, 512, 512)


def memory(seed: int, frames: int = 64) -> KVMemory:
    found = KVMemory.reserve(Geometry(SLOTS, slot_stride=frames * 48, piece_bytes=48, n_frames=frames))
    found.data[:] = np.random.default_rng(seed).integers(0, 256, found.data.nbytes, np.uint8)
    return found


def draw(rng: random.Random, frames: int = 64) -> list[list[int]]:
    """Frames of a block, of each group."""
    numbers = rng.sample(range(frames), FRAMES * len(SLOTS))
    return [numbers[group * FRAMES : (group + 1) * FRAMES] for group in range(len(SLOTS))]


def bytes_of(pool: KVMemory, group: int, frame: int) -> bytes:
    numbers = [array("i", (frame,) if other == group else ()) for other in range(len(SLOTS))]
    return pool.frames(numbers).gather().tobytes()


def holes(frames: Sequence[Sequence[int]], wanted: Sequence[Sequence[bool]]) -> list[list[int]]:
    return [[frame if keep else HOLE for frame, keep in zip(*of_group, strict=True)] for of_group in zip(frames, wanted, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_wanted_is_written_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    source, target = memory(1), memory(2)
    theirs, mine = draw(rng), draw(rng)
    payload = BlockBytes(source, WINDOWS).gather(theirs)
    assert payload is not None
    wanted = [[rng.random() < 0.6 for _ in range(FRAMES)] for _ in SLOTS]
    before = target.data.copy()
    assert BlockBytes(target, WINDOWS).scatter(payload, holes(mine, wanted))
    for group, (from_, to, keeps) in enumerate(zip(theirs, mine, wanted, strict=True)):
        for index in range(FRAMES):
            if keeps[index]:
                assert bytes_of(target, group, to[index]) == bytes_of(source, group, from_[index])
    slots_written = {frame: SLOTS[group] for group, frames in enumerate(holes(mine, wanted)) for frame in frames if frame != HOLE}
    changed = (target.data != before).reshape(max(SLOTS), 64, 48).any(axis=2)
    for slot, frame in zip(*changed.nonzero(), strict=True):
        assert slot < slots_written.get(frame, 0), "a byte was written where nothing was wanted"


def test_windows_may_be_missing_for_who_does_not_look_at_them() -> None:
    rng = random.Random(3)
    source, target = memory(1), memory(2)
    theirs, mine = draw(rng), draw(rng)
    theirs[1][0] = HOLE  # which has fallen out of sight
    bytes_ = BlockBytes(source, WINDOWS)
    payload = bytes_.gather(theirs)
    assert payload is not None
    assert len(payload) == bytes_.sizes[1] == FRAMES * 3 * 48
    before = target.data.copy()
    assert not BlockBytes(target, WINDOWS).scatter(payload, mine)
    assert (target.data == before).all(), "something was written of what cannot be used"
    without = [mine[0], [HOLE] * FRAMES, [HOLE] * FRAMES]
    assert BlockBytes(target, WINDOWS).scatter(payload, without)
    assert [bytes_of(target, 0, frame) for frame in mine[0]] == [bytes_of(source, 0, frame) for frame in theirs[0]]


def test_there_is_nothing_to_keep_of_a_block_that_has_lost_what_all_look_at() -> None:
    theirs = draw(random.Random(4))
    theirs[0][3] = HOLE
    assert BlockBytes(memory(1), WINDOWS).gather(theirs) is None


def test_nor_of_one_that_has_windows_alone_and_has_lost_them() -> None:
    pool = KVMemory.reserve(Geometry((2,), slot_stride=16 * 48, piece_bytes=48, n_frames=16))
    bytes_ = BlockBytes(pool, (64,))
    assert bytes_.gather([[HOLE, *range(1, FRAMES)]]) is None
    assert bytes_.gather([list(range(FRAMES))]) is not None
