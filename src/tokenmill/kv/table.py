"""The page table of one sequence: which frames hold its positions, as extents of contiguous frames."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


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

    first: the first frame of each extent, int32.
    starts: the index (position // 8) of that frame within the sequence, int32, ascending.
    n_frames: frames in all extents; extent i ends where the next one starts, the last one here.

    Kernels read the arrays as they are; they are updated in place, so a caller copies what it keeps.
    """

    __slots__ = ("first", "n_frames", "starts")

    def __init__(self) -> None:
        self.first = array("i")
        self.starts = array("i")
        self.n_frames = 0

    def append(self, first: int, count: int) -> None:
        """Add the frames [first, first + count) at the end."""
        assert count > 0, "an extent has at least one frame"
        if not self.first or self.first[-1] + self.n_frames - self.starts[-1] != first:
            self.first.append(first)
            self.starts.append(self.n_frames)
        self.n_frames += count

    def truncate(self, n_frames: int) -> None:
        """Keep the first `n_frames` frames."""
        assert 0 <= n_frames <= self.n_frames, f"cannot cut a table of {self.n_frames} frames to {n_frames}"
        count = bisect_left(self.starts, n_frames)
        del self.first[count:], self.starts[count:]
        self.n_frames = n_frames

    def extents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The frames at indices [start, stop) as (first frame, frames) pieces, in order."""
        assert 0 <= start <= stop <= self.n_frames, f"[{start}, {stop}) of a table of {self.n_frames} frames"
        pieces = []
        at = bisect_right(self.starts, start) - 1
        while start < stop:
            end = self.starts[at + 1] if at + 1 < len(self.starts) else self.n_frames
            count = min(end, stop) - start
            pieces.append((self.first[at] + start - self.starts[at], count))
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
