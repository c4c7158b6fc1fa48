"""A buddy allocator over frames. Pages are 1, 2, 4 or 8 contiguous frames, aligned to their own size."""

from __future__ import annotations

MAX_ORDER = 3
MAX_PAGE = 1 << MAX_ORDER
"""Frames in the largest page."""

FREE = 0xFF
"""In place of a page's order: the frame is free."""

_FREE = bytes([FREE])
_RUN = [bytes([order]) * (1 << order) for order in range(MAX_ORDER + 1)]


class BuddyAllocator:
    """Hands out pages and takes back frames, whole pages or any part of them, in O(1) per page.

    A page may come back frame by frame, because sharing counts frames: neighbours coalesce as they meet.
    The most recently freed page is handed out first, and a fresh pool from frame 0 upwards, so that the pages
    of a long prompt lie side by side.
    """

    def __init__(self, n_frames: int) -> None:
        assert n_frames > 0, f"a pool of {n_frames} frames"
        self.n_frames = n_frames
        self.n_free = 0
        # Per order, the first frames of its free pages: a dict is the ordered set that pops and removes in O(1).
        self._free: list[dict[int, None]] = [{} for _ in range(MAX_ORDER + 1)]
        self._order = bytearray([FREE]) * n_frames
        for first in reversed(range(0, n_frames, MAX_PAGE)):
            self.free(first, min(MAX_PAGE, n_frames - first))

    @property
    def orders(self) -> bytes:
        """Of each frame, the order of the page that it was handed out in, or `FREE`."""
        return bytes(self._order)

    @property
    def n_free_pages(self) -> list[int]:
        """Free pages of each order, neighbours joined."""
        return [len(pages) for pages in self._free]

    def allocate(self, wanted: int) -> tuple[int, int]:
        """Return (first frame, frames) of a page of `wanted` frames, or of the largest free one below that.

        wanted: 1, 2, 4 or 8. At least one frame must be free.
        """
        order = wanted.bit_length() - 1
        assert wanted == 1 << order <= MAX_PAGE, f"no page has {wanted} frames"
        assert self.n_free, "allocate() on an empty pool"
        for source in (*range(order, MAX_ORDER + 1), *range(order - 1, -1, -1)):
            if self._free[source]:
                break
        order = min(order, source)
        first, _ = self._free[source].popitem()
        while source > order:
            source -= 1
            self._free[source][first + (1 << source)] = None
        self.n_free -= 1 << order
        self._order[first : first + (1 << order)] = _RUN[order]
        return first, 1 << order

    def free(self, first: int, count: int) -> None:
        """Take back the frames [first, first + count)."""
        end = first + count
        assert 0 <= first < end <= self.n_frames, f"frames [{first}, {end}) of a pool of {self.n_frames}"
        self._order[first:end] = _FREE * count
        while first < end:
            alignment = (first | MAX_PAGE) & -(first | MAX_PAGE)
            order = min(alignment, end - first).bit_length() - 1
            self._give(first, order)
            first += 1 << order
        self.n_free += count

    def _give(self, first: int, order: int) -> None:
        while order < MAX_ORDER and (buddy := first ^ (1 << order)) in self._free[order]:
            del self._free[order][buddy]
            first &= ~(1 << order)
            order += 1
        assert first not in self._free[order], f"frame {first} is freed twice"
        self._free[order][first] = None

    def free_pages(self) -> list[tuple[int, int]]:
        """All free pages as (first frame, frames), ascending."""
        return sorted((first, 1 << order) for order, pages in enumerate(self._free) for first in pages)

    def check_integrity(self) -> None:
        """Assert that free pages are aligned, disjoint, fully coalesced, inside the pool, and counted right."""
        pages = self.free_pages()
        joined = set(pages)
        end = 0
        for first, size in pages:
            assert first % size == 0, f"page at frame {first} is not aligned to its {size} frames"
            assert end <= first, f"page at frame {first} overlaps another"
            assert size == MAX_PAGE or (first ^ size, size) not in joined, f"free page at frame {first} was not joined with its buddy"
            end = first + size
        assert end <= self.n_frames, f"a free page ends at frame {end} of a pool of {self.n_frames}"
        assert sum(size for _, size in pages) == self.n_free, "the count of free frames is wrong"
        in_use = bytearray(b"\1") * self.n_frames
        for first, size in pages:
            in_use[first : first + size] = bytes(size)
        assert all((order != FREE) == bool(used) for order, used in zip(self._order, in_use, strict=True)), "a frame is wrongly marked"
