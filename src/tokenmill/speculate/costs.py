"""What a step costs by its number of rows, on this machine, as measured while serving."""

from __future__ import annotations

from bisect import bisect_left, insort

SLOPE = 0.2
"""A row more, in units of a step of one row, where nothing is measured yet."""

WEIGHT = 1 / 8
"""Of a new measurement against what is known."""

CHECK = 1 / 2
"""Of one that was made because what is known may be out of date."""

OUTLIER = 2.0
"""What took so many times what is known was disturbed, and counts as this many times."""


KEPT = 512
"""Steps without drafts for which it is believed what others cost. Who is thought to be dear is not tried, so that an error would stay for
good, and so would what was true of a busy machine or of longer sequences."""


class StepCosts:
    """Seconds of decode steps by rows: a moving average for each number that occurred, lines between them, and the usual shape
    beyond."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._rows: list[int] = []  # ascending
        self._plain = 0  # steps without drafts
        self._seen: dict[int, int] = {}  # how many those were when there was one of so many rows

    @property
    def known(self) -> bool:
        return bool(self._rows)

    def observe(self, rows: int, seconds: float, weight: float = WEIGHT) -> None:
        """A step of so many rows took so long. weight: against what is known."""
        if rows not in self._seconds:
            insort(self._rows, rows)
        self._seconds[rows] = average(self._seconds.get(rows), seconds, weight)
        self._seen[rows] = self._plain

    def note_plain(self) -> None:
        """There was a step without drafts. What was last observed long ago is forgotten, but for the fewest rows."""
        self._plain += 1
        for rows in [rows for rows in self._rows[1:] if self._plain - self._seen[rows] >= KEPT]:
            self._rows.remove(rows)
            del self._seconds[rows], self._seen[rows]

    def seconds(self, rows: int) -> float:
        """Expected of a step with so many rows; something must be known."""
        if rows in self._seconds:
            return self._seconds[rows]
        at = bisect_left(self._rows, rows)
        if at == 0 or at == len(self._rows):
            near = self._rows[0 if at == 0 else -1]
            return self._seconds[near] * _shape(rows) / _shape(near)
        low, high = self._rows[at - 1], self._rows[at]
        share = (rows - low) / (high - low)
        return (1 - share) * self._seconds[low] + share * self._seconds[high]


def average(known: float | None, new: float, weight: float = WEIGHT) -> float:
    """Seconds with one more measurement; None: the first."""
    return new if known is None else known + weight * (min(new, OUTLIER * known) - known)


def _shape(rows: int) -> float:
    return 1 + SLOPE * (rows - 1)
