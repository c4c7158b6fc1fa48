"""How many rows a step may have so that it does not keep streams waiting, by what earlier steps took."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.scheduler.plan import Work

FIRST = 64.0
"""Rows of the first steps, before anything is known."""

WEIGHT = 0.5
"""Of a step against what is known. A single one says twice or half as much at most, since the system may have put it aside."""


class Pace:
    """Looks for the number of rows whose step takes `seconds`.

    A step that took too long, or had all the rows that it was given, moves it in proportion to the time that was taken or left. Time
    grows with rows from a base that is paid in any case, so that each such move leaves less to go, and none passes the aim. Other
    steps say nothing about larger ones.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rows = FIRST

    @property
    def rows(self) -> int:
        """Of a step in which somebody decodes."""
        return int(self._rows)

    def learn(self, step: Iterable[Work], seconds: float) -> None:
        """The step took `seconds`."""
        rows = streams = 0
        for work in step:
            rows += work.n_tokens + len(work.draft)
            streams += work.n_tokens == 1
        if 0 < streams < rows and (seconds > self._seconds or rows >= self.rows):
            fitting = rows * self._seconds / max(seconds, 1e-9)
            self._rows += WEIGHT * (min(max(fitting, self._rows / 2), 2 * self._rows) - self._rows)
