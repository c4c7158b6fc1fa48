"""What a draft model has computed: which frames hold its keys and values of which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from tokenmill.core.types import FRAME
from tokenmill.kv.table import HOLE, PageTable


class Marks:
    """One for each frame of the pool: what lies in it. Frames change hands without a word, so a mark tells all of what it means.

    A digest, above 0, says that the frame is full, and of all tokens up to its end. A number below 0 is that of the table in which it is
    being filled.
    """

    def __init__(self, n_frames: int) -> None:
        self._marks = np.zeros(n_frames, np.int64)
        self._numbers = count(1)

    def number(self) -> int:
        """One that was never given."""
        return -next(self._numbers)

    def __getitem__(self, frame: int) -> int:
        return int(self._marks[frame])

    def __setitem__(self, frame: int, mark: int) -> None:
        self._marks[frame] = mark

    def agreeing(self, frames: Sequence[int], expected: Sequence[int]) -> int:
        """How many of the frames, from the first one, have the marks that are expected; holes always do."""
        places = np.array(frames, np.int64)
        fine = (self._marks[places] == np.array(expected, np.int64)) | (places == HOLE)
        return len(frames) if fine.all() else int(fine.argmin())


class Trail:
    """A sequence as a draft model knows it."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._table: PageTable | None = None
        self._number = 0
        self._digests: list[int] = []  # of the tokens up to the end of each full frame
        self._base = 0
        self._tail: list[int] = []  # the tokens computed last, from position _base on; drafted ones among them

    def computed(self, table: PageTable, tokens: Sequence[int]) -> tuple[int, int]:
        """(blind, computed): frames that are not to be looked at, because there is a hole among them that can no longer be filled; and
        positions of `tokens`, from the first one after those, that need not be computed."""
        if table is not self._table:  # the sequence is new, or was preempted
            self._table, self._number, self._tail = table, self._marks.number(), []
        full = len(tokens) // FRAME
        self._digest(tokens, full)
        frames = table.frames(0, min(full + 1, table.n_frames))
        same = self._promote(frames, tokens)
        expected = [*self._digests[:full], self._number][: len(frames)]
        blind, found = 0, self._marks.agreeing(frames, expected)
        if holes := [at for at in range(found, len(frames)) if frames[at] == HOLE]:
            blind = holes[-1] + 1
            found = blind + self._marks.agreeing(frames[blind:], expected[blind:])
        return blind, max(full * FRAME, same) if found > full else found * FRAME

    def note(self, tokens: Sequence[int], start: int, written: Sequence[int]) -> None:
        """`written` are computed, from position `start` on, as is what comes before them. tokens: what the sequence has of all this."""
        assert self._table is not None, "what is computed is asked first"
        if self._base <= start <= self._base + len(self._tail):
            self._tail[start - self._base :] = written
        else:
            self._base, self._tail = start, list(written)
        first, end = start // FRAME, start + len(written)
        known = min(end, len(tokens)) // FRAME
        self._digest(tokens, known)
        for at, frame in enumerate(self._table.frames(first, -(-end // FRAME)), first):
            self._marks[frame] = self._digests[at] if at < known else self._number

    def _digest(self, tokens: Sequence[int], n_frames: int) -> None:
        for at in range(len(self._digests), n_frames):
            before = self._digests[-1] if self._digests else 0
            self._digests.append(hash((before, *tokens[at * FRAME : (at + 1) * FRAME])) >> 2 & (1 << 61) - 1 | 1)

    def _promote(self, frames: Sequence[int], tokens: Sequence[int]) -> int:
        """Up to which position the sequence has what was computed last. Frames that are full of it get their digests."""
        same = self._base
        for mine, theirs in zip(self._tail, tokens[self._base : self._base + len(self._tail)], strict=False):
            if mine != theirs:
                break
            same += 1
        end = min(same // FRAME, len(frames))
        for at in range(self._base // FRAME, end):
            if frames[at] != HOLE and self._marks[frames[at]] == self._number:
                self._marks[frames[at]] = self._digests[at]
        if (cut := end * FRAME - self._base) > 0:
            del self._tail[:cut]
            self._base += cut
        return same
