"""How a block's frames lie in the bytes by which a KV store has them: a frame of positions after the other, and of each its KV groups in
order.

So whoever has the first frames of a block takes the rest of it alone. Groups with windows may be missing: what has fallen out of sight
when a block is kept is not needed by who goes on far behind it either, and who does need it takes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from tokenmill.engine.filling import FRAMES
from tokenmill.kernels.frames import U8, KVMemory

HOLE = -1
"""In place of a frame: there is none, or none is wanted."""


class BlockBytes:
    """Of one pool. sizes: what payloads can be long, with and without groups that have windows, the longest first."""

    def __init__(self, memory: KVMemory, windows: Sequence[int | None]) -> None:
        """windows: of each KV group, in positions; None where all are kept."""
        self._memory = memory
        pieces = [slots * memory.geometry.piece_bytes for slots in memory.geometry.slots]
        kept = [piece for piece, window in zip(pieces, windows, strict=True) if window is None]
        self._pieces = pieces
        self._windows = tuple(window is not None for window in windows)
        self.sizes: tuple[int, ...] = tuple(dict.fromkeys((FRAMES * sum(pieces), FRAMES * sum(kept))))

    def gather(self, frames: Sequence[Sequence[int]]) -> U8 | None:
        """The payload of a block, a copy. frames: of each group, `FRAMES` numbers or holes. None if there is nothing in it for anybody:
        frames are missing of a group that keeps all."""
        there = [HOLE not in of_group for of_group in frames]
        if not all(there):
            there = [not window for window in self._windows]
        if not any(there) or any(HOLE in of_group for of_group, chosen in zip(frames, there, strict=True) if chosen):
            return None
        size = sum(piece for piece, chosen in zip(self._pieces, there, strict=True) if chosen)
        payload = np.empty(FRAMES * size, np.uint8)
        for at in range(FRAMES):
            numbers = [_just(of_group[at] if chosen else HOLE) for of_group, chosen in zip(frames, there, strict=True)]
            self._memory.frames(numbers).gather(payload[at * size : (at + 1) * size])
        return payload

    def scatter(self, payload: U8, frames: Sequence[Sequence[int]]) -> bool:
        """Write a payload to a block's frames, but for holes. Returns whether it has all of them; if it has not, nothing is written.

        payload: as long as one of `sizes`.
        """
        full = len(payload) == self.sizes[0]
        there = [full or not window for window in self._windows]
        if any(set(of_group) != {HOLE} for of_group, has in zip(frames, there, strict=True) if not has):
            return False
        at = 0
        for position in range(FRAMES):
            for group, piece in enumerate(self._pieces):
                if not there[group]:
                    continue
                frame = frames[group][position]
                if frame != HOLE:
                    numbers = [_just(frame if other == group else HOLE) for other in range(len(self._pieces))]
                    self._memory.frames(numbers).scatter(payload[at : at + piece])
                at += piece
        return True


def _just(frame: int) -> array[int]:
    return array("i", () if frame == HOLE else (frame,))
