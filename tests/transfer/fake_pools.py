"""Pools that hold random bytes instead of keys and values, and what must be read from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.kernels.frames import Geometry, KVMemory

U8 = npt.NDArray[np.uint8]
Numbers = list[npt.NDArray[np.int32]]

SLOTS, PIECE = (7, 3, 5), 52
"""Groups of unequal size, pieces that no vector instruction likes."""

THEIRS = Geometry(SLOTS, 301 * PIECE + 17, PIECE, 301)
MINE = Geometry(SLOTS, 119 * PIECE, PIECE, 119)


def random_bytes(geometry: Geometry, seed: int) -> U8:
    return np.random.default_rng(seed).integers(0, 256, geometry.nbytes, np.uint8)


def pool(geometry: Geometry, content: U8) -> KVMemory:
    """A pool that others can map."""
    memory = KVMemory.reserve(geometry)
    memory.data[:] = content
    return memory


def pieces(geometry: Geometry, numbers: Numbers) -> npt.NDArray[np.int64]:
    """Where in the pool each piece of the stream begins: by the definition, step by step."""
    g = geometry
    places = [
        slot * g.slot_stride + int(frame) * g.piece_bytes
        for slots, frames in zip(g.slots, numbers, strict=True)
        for slot in range(slots)
        for frame in frames
    ]
    return np.array(places, np.int64)


def stream(content: U8, geometry: Geometry, numbers: Numbers) -> U8:
    """The bytes that travel."""
    return content[(pieces(geometry, numbers)[:, None] + np.arange(geometry.piece_bytes)).ravel()]


def written(content: U8, geometry: Geometry, numbers: Numbers, data: U8) -> U8:
    """What a pool holds once `data` has come to these frames."""
    after = content.copy()
    after[(pieces(geometry, numbers)[:, None] + np.arange(geometry.piece_bytes)).ravel()] = data
    return after


def draw(rng: np.random.Generator, geometry: Geometry, counts: list[int]) -> Numbers:
    """So many frames of each group, each once in the whole pool, in runs of up to 8 as pages are."""
    runs = np.split(np.arange(geometry.n_frames), np.sort(rng.choice(geometry.n_frames, geometry.n_frames // 4, replace=False)))
    rng.shuffle(runs := [run for run in runs if len(run)])  # type: ignore[arg-type]
    order = np.concatenate(runs).astype(np.int32)
    assert sum(counts) <= len(order), "the pool is too small for the test"
    return np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
