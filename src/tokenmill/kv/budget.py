"""What a sequence does when it has used up its KV budget: a ladder of points, fixed by numbers alone, so that a replay meets the same.

A budget counts the frames that a sequence keeps, over all groups, shared ones in full. What a window or streaming group holds for the
positions of the step that is being computed is the pool's affair, so that points do not depend on how a prompt is cut into steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from tokenmill.core.types import FRAME, Strategy
from tokenmill.kv.footprint import Footprint, frames_for

WEIGHED = 64
"""Positions before a point whose attention weights decide which frames go; their own frames stay."""


@dataclass(frozen=True, slots=True)
class SparsePolicy:
    """What happens when trigger_threshold of a budget is used, or, if nothing can go then, as soon as something can.

    topk_heads: at the first point streaming groups keep their sinks and recent positions only; later ones are as with
    topk_positions: the lightest frames of whole groups go, so that `keep_ratio` of those that may go stay. The first `sinks`
    positions and the last 64 never go. none: nothing goes, and the sequence ends when its budget is used up.
    """

    strategy: Strategy = "none"
    trigger_threshold: float = 0.9
    keep_ratio: float = 0.7
    sinks: int = 16

    def __post_init__(self) -> None:
        assert 0 < self.trigger_threshold <= 1, f"a trigger threshold of {self.trigger_threshold}"
        assert 0 <= self.keep_ratio <= 1, f"a keep ratio of {self.keep_ratio}"
        assert self.sinks % FRAME == 0, f"{self.sinks} sinks are no multiple of {FRAME}"


class Rung(NamedTuple):
    """point: once so many tokens are computed, and before the next one is, frames go. drop: how many, of each whole group; 0 when
    it is the streaming groups that drop their middle."""

    point: int
    drop: int

    @property
    def weighs(self) -> bool:
        """Whether attention weights of the `WEIGHED` positions before the point decide what goes."""
        return self.drop > 0


class Ladder:
    """The points of one budget, found as far as they are asked for. budget: frames over all groups."""

    def __init__(self, budget: int, policy: SparsePolicy, footprint: Footprint) -> None:
        self.budget = budget
        self._policy = policy
        self._footprint = footprint
        self._rungs: list[Rung] = []
        self._points: list[int] = []
        self._dropped = [0]  # by each whole group, before the first point and after each
        self._peaks = [0]  # the most that was kept, likewise
        self._ends = policy.strategy == "none"
        self._streams = policy.strategy == "topk_heads" and footprint.streaming > 0

    def rung(self, number: int) -> Rung | None:
        """The point of that number, from 0, or None when there are no more."""
        while len(self._rungs) <= number and not self._ends:
            self._climb()
        return self._rungs[number] if number < len(self._rungs) else None

    def peak(self, n_tokens: int) -> int:
        """The most frames that a sequence has kept when it covers `n_tokens` positions. It may be above the budget."""
        while not self._ends and (not self._points or self._points[-1] < n_tokens):
            self._climb()
        passed = bisect_left(self._points, n_tokens)
        return max(self._peaks[passed], self._kept(frames_for(n_tokens), passed))

    def fits(self, n_tokens: int) -> bool:
        """Whether a sequence can cover `n_tokens` positions within the budget."""
        return self.peak(n_tokens) <= self.budget

    def enough(self, n_tokens: int) -> int:
        """A budget in which `n_tokens` positions fit, which they do not in this one: the least, if they fit in all larger ones."""

        def fits(budget: int) -> bool:
            return Ladder(budget, self._policy, self._footprint).fits(n_tokens)

        known = self.peak(n_tokens)
        while not fits(known):
            known *= 2
        return bisect_left(range(known), True, lo=self.budget + 1, key=fits)

    def longest(self) -> int:
        """Tokens that fit before anything has to go, or of which the budget would hold any number: then the budget's own number."""
        return FRAME * (self._reach(self.budget, 0) or self.budget)

    def _kept(self, frames: int, passed: int) -> int:
        return self._footprint.kept(frames, self._dropped[passed], sparse=passed > 0 and self._streams)

    def _reach(self, limit: int, passed: int) -> int | None:
        """The most frames of positions with which no more than `limit` frames are kept; None when there is no most."""
        high = self.budget + self._dropped[passed] + 1
        if self._kept(high, passed) <= limit:
            return None
        return bisect_right(range(high), limit, key=lambda frames: self._kept(frames, passed)) - 1

    def _climb(self) -> None:
        passed = len(self._rungs)
        self._ends = True
        lowest = self._reach(math.floor(self._policy.trigger_threshold * self.budget), passed)
        if lowest is None:
            return
        if passed:
            lowest = max(lowest, (self._points[-1] + WEIGHED) // FRAME)
        # A threshold that is met before there is anything to give up waits until there is.
        frames = next((frames for frames in self._within_budget(lowest, passed) if self._frees(frames, passed)), None)
        if frames is None:
            return
        drop = 0 if self._drops_heads(passed) else self._drop(frames - self._dropped[passed])
        self._ends = False
        self._rungs.append(Rung(frames * FRAME, drop))
        self._points.append(frames * FRAME)
        self._dropped.append(self._dropped[passed] + drop)
        self._peaks.append(max(self._peaks[passed], self._kept(frames, passed)))

    def _within_budget(self, lowest: int, passed: int) -> Iterator[int]:
        """Frames of positions from `lowest` on that can be kept."""
        return takewhile(lambda frames: self._kept(frames, passed) <= self.budget, range(lowest, lowest + self.budget + 1))

    def _drops_heads(self, passed: int) -> bool:
        """Whether it is the streaming groups that give up their middle at the next point."""
        return passed == 0 and self._streams

    def _frees(self, frames: int, passed: int) -> bool:
        if self._drops_heads(passed):
            return frames > (self._footprint.sinks + self._footprint.recent) // FRAME
        return self._drop(frames - self._dropped[passed]) > 0

    def _drop(self, present: int) -> int:
        """How many of the frames that a whole group has are to go."""
        if not self._footprint.whole:
            return 0
        droppable = present - (self._policy.sinks + WEIGHED) // FRAME
        return max(0, droppable - math.ceil(self._policy.keep_ratio * droppable - 1e-9))


def lightest(weights: Sequence[int], candidates: Sequence[int], count: int) -> list[int]:
    """The `count` candidates (frame indices) of the least weight, ascending; of equal ones the earlier goes first."""
    return sorted(sorted(candidates, key=lambda index: (weights[index], index))[:count])
