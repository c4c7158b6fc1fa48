"""The page table of one sequence: which frames hold its positions, as extents of contiguous frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.int32]


def runs(frames: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) for each maximal run of consecutive numbers."""
    first = count = 0
    for frame in frames:
        if count and frame == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = frame, 1
    if count:
        yield first, count


class PageTable:
    """Ordered extents. Neighbours in memory are one extent, so a kernel walks extents, not frames.

    first: int32[capacity], the first frame of extent i.
    starts: int32[capacity], the index (position // 8) of extent i's first frame within the sequence, ascending.
    count: extents; only that many entries of the arrays mean anything.
    n_frames: frames in all extents; extent i ends where the next one starts, the last one here.

    The arrays are updated in place and replaced by longer ones as they fill (amortised O(1) per extent), so a
    caller takes them afresh each step and never keeps them.
    """

    __slots__ = ("count", "first", "n_frames", "starts")

    def __init__(self) -> None:
        self.first: Frames = np.zeros(8, np.int32)
        self.starts: Frames = np.zeros(8, np.int32)
        self.count = 0
        self.n_frames = 0

    def append(self, first: int, count: int) -> None:
        """Add the frames [first, first + count) at the end."""
        assert count > 0, "an extent has at least one frame"
        last = self.count - 1
        if last < 0 or int(self.first[last]) + self.n_frames - int(self.starts[last]) != first:
            if self.count == len(self.first):
                self.first = np.concatenate([self.first, np.zeros_like(self.first)])
                self.starts = np.concatenate([self.starts, np.zeros_like(self.starts)])
            self.first[self.count] = first
            self.starts[self.count] = self.n_frames
            self.count += 1
        self.n_frames += count

    def truncate(self, n_frames: int) -> None:
        """Keep the first `n_frames` frames."""
        assert 0 <= n_frames <= self.n_frames, f"cannot cut a table of {self.n_frames} frames to {n_frames}"
        self.count = int(np.searchsorted(self.starts[: self.count], n_frames))
        self.n_frames = n_frames

    def extents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The frames at indices [start, stop) as (first frame, frames) pieces, in order."""
        assert 0 <= start <= stop <= self.n_frames, f"[{start}, {stop}) of a table of {self.n_frames} frames"
        pieces = []
        at = int(np.searchsorted(self.starts[: self.count], start, side="right")) - 1
        while start < stop:
            end = int(self.starts[at + 1]) if at + 1 < self.count else self.n_frames
            count = min(end, stop) - start
            pieces.append((int(self.first[at]) + start - int(self.starts[at]), count))
            start += count
            at += 1
        return pieces

    def frames(self, start: int, stop: int) -> list[int]:
        """The frame at each index of [start, stop)."""
        return [frame for first, count in self.extents(start, stop) for frame in range(first, first + count)]

    def replace(self, start: int, frames: list[int]) -> None:
        """Put other frames at the indices [start, start + len(frames)). O(extents)."""
        stop = start + len(frames)
        tail = self.extents(stop, self.n_frames)
        self.truncate(start)
        for first, count in (*runs(frames), *tail):
            self.append(first, count)
