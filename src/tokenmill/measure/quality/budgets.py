"""What a KV budget means for texts of a length: whether they fit, and whether anything of them is given up. Nothing is loaded."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from tokenmill.kv.budget import Ladder
from tokenmill.kv.footprint import frames_for
from tokenmill.measure.kv_model import KVModel


@dataclass(frozen=True)
class Budgets:
    """Budgets are in MiB."""

    model: KVModel

    def fits(self, budget: float, n_tokens: int) -> bool:
        return self._ladder(self._frames(budget)).fits(n_tokens)

    def sparsifies(self, budget: float, n_tokens: int) -> bool:
        return self._point(self._frames(budget)) <= n_tokens

    def least(self, n_tokens: int) -> float:
        """The smallest budget in which a text of that length fits."""
        smallest = self._ladder(1)
        return self._megabytes(1 if smallest.fits(n_tokens) else smallest.enough(n_tokens))

    def most(self, n_tokens: int) -> float | None:
        """The largest budget with which a text of that length is sparsified; None for a text too short to be."""
        all_of_it = self.model.footprint.kept(frames_for(n_tokens) + 1)
        beyond = math.ceil(all_of_it / self.model.policy.trigger_threshold) + 1
        later = bisect_left(range(beyond), True, lo=1, key=lambda budget: n_tokens < self._point(budget) < math.inf)
        return self._megabytes(later - 1) if later > 1 and self._point(later - 1) <= n_tokens else None

    def _point(self, frames: int) -> float:
        """Where a sequence first gives something up; infinite if its budget is used up before that."""
        rung = self._ladder(frames).rung(0)
        return math.inf if rung is None else rung.point

    def _ladder(self, frames: int) -> Ladder:
        return Ladder(frames, self.model.policy, self.model.footprint)

    def _frames(self, budget: float) -> int:
        return int(budget * 2**20) // self.model.frame_bytes

    def _megabytes(self, frames: int) -> float:
        return frames * self.model.frame_bytes / 2**20
