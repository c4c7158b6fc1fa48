"""Whether drafting pays, as measured: what costs and odds promise is checked against what came."""

from __future__ import annotations

MEMORY = 0.9
"""What a step leaves of earlier ones: some ten count."""

ENOUGH = 6.0
"""Steps after which there is a verdict."""

LOSS = 0.01
"""Share of time that may be lost before drafting rests: measurements are no better."""

SHORTEST, LONGEST = 16, 512
"""Steps of a rest: twice as many each time that drafting did not pay at once."""


class Balance:
    """Of steps with drafts: the time they took, and the time in which steps without would have given as many tokens. Both fade."""

    def __init__(self) -> None:
        self._steps = self._took = self._would = 0.0
        self._rest = 0
        self._next_rest = SHORTEST

    def rests(self) -> bool:
        """To be asked once a step: whether it is to do without drafts."""
        if self._rest:
            self._rest -= 1
            return True
        return False

    def note(self, took: float, would: float) -> None:
        """A step with drafts took so many seconds, drafting included; without, its tokens would have taken `would`."""
        self._steps = MEMORY * self._steps + 1
        self._took = MEMORY * self._took + took
        self._would = MEMORY * self._would + would
        if self._steps < ENOUGH:
            return
        if self._would < (1 - LOSS) * self._took:
            self._rest, self._next_rest = self._next_rest, min(LONGEST, 2 * self._next_rest)
            self._steps = self._took = self._would = 0.0
        elif self._would > (1 + LOSS) * self._took:
            self._next_rest = SHORTEST
