"""The page table of one sequence in one group: which frames hold its positions, as extents of contiguous frames."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

HOLE = -1
"""In place of a frame: these positions have none."""


def runs(frames: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) for each maximal run of consecutive numbers; each hole is a run of its own."""
    first = count = 0
    for frame in frames:
        if count and frame == first + count and first != HOLE:
            count += 1
            continue
        if count:
            yield first, count
        first, count = frame, 1
    if count:
        yield first, count


class PageTable:
    """Ordered extents. Neighbours in memory are one extent, so a kernel walks extents, not frames; neighbouring holes are one, too.

    first: the first frame of each extent, or -1 for a hole, int32.
    starts: the index (position // 8) of that frame within the sequence, int32, ascending.
    n_frames: frames and holes in all extents; extent i ends where the next one starts, the last one here.
    n_holes: those of them that are holes.

    Kernels read the arrays as they are; they are updated in place, so a caller copies what it keeps.
    """

    __slots__ = ("first", "n_frames", "n_holes", "starts")

    def __init__(self) -> None:
        self.first = array("i")
        self.starts = array("i")
        self.n_frames = 0
        self.n_holes = 0

    @property
    def present(self) -> int:
        """Frames that are there."""
        return self.n_frames - self.n_holes

    def append(self, first: int, count: int) -> None:
        """Add the frames [first, first + count) at the end, or `count` holes for `first` = -1."""
        assert count > 0, "an extent has at least one frame"
        last = self.first[-1] if self.first else None
        if first == HOLE:
            joins = last == HOLE
            self.n_holes += count
        else:
            joins = last is not None and last != HOLE and last + self.n_frames - self.starts[-1] == first
        if not joins:
            self.first.append(first)
            self.starts.append(self.n_frames)
        self.n_frames += count

    def truncate(self, n_frames: int) -> None:
        """Keep the first `n_frames` frames."""
        assert 0 <= n_frames <= self.n_frames, f"cannot cut a table of {self.n_frames} frames to {n_frames}"
        if self.n_holes:
            self.n_holes -= sum(count for first, count in self.extents(n_frames, self.n_frames) if first == HOLE)
        count = bisect_left(self.starts, n_frames)
        del self.first[count:], self.starts[count:]
        self.n_frames = n_frames

    def extents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The frames at indices [start, stop) as (first frame, frames) pieces, in order; holes as (-1, holes)."""
        assert 0 <= start <= stop <= self.n_frames, f"[{start}, {stop}) of a table of {self.n_frames} frames"
        pieces = []
        at = bisect_right(self.starts, start) - 1
        while start < stop:
            end = self.starts[at + 1] if at + 1 < len(self.starts) else self.n_frames
            count = min(end, stop) - start
            first = self.first[at]
            pieces.append((first if first == HOLE else first + start - self.starts[at], count))
            start += count
            at += 1
        return pieces

    def frames(self, start: int, stop: int) -> list[int]:
        """The frame at each index of [start, stop), -1 where there is none."""
        found: list[int] = []
        for first, count in self.extents(start, stop):
            found += [HOLE] * count if first == HOLE else range(first, first + count)
        return found

    def held(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The runs of indices [from, to) within [start, stop) that have frames."""
        found: list[tuple[int, int]] = []
        for first, count in self.extents(start, stop):
            if first != HOLE:
                if found and found[-1][1] == start:
                    found[-1] = (found[-1][0], start + count)
                else:
                    found.append((start, start + count))
            start += count
        return found

    def replace(self, start: int, frames: list[int]) -> None:
        """Put other frames at the indices [start, start + len(frames)). O(extents)."""
        stop = start + len(frames)
        tail = self.extents(stop, self.n_frames)
        self.truncate(start)
        for first, count in (*runs(frames), *tail):
            self.append(first, count)

    def punch(self, start: int, stop: int) -> None:
        """Make the indices [start, stop) a hole. O(extents in it), apart from moving the arrays' tails."""
        assert 0 <= start < stop <= self.n_frames, f"cannot punch [{start}, {stop}) into a table of {self.n_frames} frames"
        self.n_holes += stop - start - sum(count for first, count in self.extents(start, stop) if first == HOLE)
        at = bisect_right(self.starts, start) - 1  # extents [at, end) are replaced
        end = bisect_left(self.starts, stop)
        first, starts = array("i"), array("i")
        if self.first[at] == HOLE:
            starts.append(self.starts[at])
        elif self.starts[at] < start:
            first.append(self.first[at])
            starts.extend((self.starts[at], start))
        elif at and self.first[at - 1] == HOLE:
            at -= 1
            starts.append(self.starts[at])
        else:
            starts.append(start)
        first.append(HOLE)
        last = self.first[end - 1]
        if last != HOLE and (self.starts[end] if end < len(self.starts) else self.n_frames) > stop:
            first.append(last + stop - self.starts[end - 1])
            starts.append(stop)
        elif end < len(self.first) and self.first[end] == HOLE:
            end += 1
        self.first[at:end] = first
        self.starts[at:end] = starts
