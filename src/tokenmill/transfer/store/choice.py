"""Whether stored blocks are fetched or computed: what each would take, by what it took lately. Pure but for the clock it is given.

Fetching `n` blocks takes a round trip, what is queued before them, and `n` times their bytes at the measured rate; computing them takes
`n` times their tokens at the measured speed of prefill. Both grow in proportion to `n`, so it is all or nothing, but for a deadline, which
allows for so many blocks. What has not been measured is hoped for. When nothing has been fetched for a while because that would not pay,
one block is, to see whether this is still so.
"""

from __future__ import annotations

import math

import msgspec

from tokenmill.core.clock import Clock

_KEPT = 0.8
"""What is left of the weight of a measurement with each further one."""


class _Rate:
    """Seconds per unit, over the latest measurements, each with the weight of its units."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def add(self, units: float, seconds: float) -> None:
        self._seconds = _KEPT * self._seconds + seconds
        self._units = _KEPT * self._units + units

    @property
    def cost(self) -> float | None:
        """Seconds per unit; None before the first measurement."""
        return self._seconds / self._units if self._units else None


class ChoicePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """again_after: seconds without a fetch after which one block is fetched although that seems not worth it."""

    again_after: float = 30.0


class FetchOrCompute:
    """Measurements, and the decision that follows from them. All times in seconds. For one thread, or under a lock."""

    def __init__(self, clock: Clock, policy: ChoicePolicy | None = None) -> None:
        self._clock = clock
        self._policy = policy or ChoicePolicy()
        self._trip = _Rate()
        self._byte = _Rate()
        self._token = _Rate()
        self._fetched_at = clock.now()

    def asked(self, seconds: float) -> None:
        """A question without data in the answer took so long."""
        self._trip.add(1, seconds)

    def fetched(self, n_bytes: int, seconds: float) -> None:
        """So many bytes came, in one exchange."""
        self._fetched_at = self._clock.now()
        if n_bytes:
            # The trip is part of what was measured, but its average may exceed a lucky whole.
            self._byte.add(n_bytes, max(seconds - (self._trip.cost or 0.0), 0.1 * seconds))

    def computed(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed."""
        if tokens:
            self._token.add(tokens, seconds)

    def worth(self, found: int, block_bytes: int, block_tokens: int, within: float = math.inf, queued_bytes: int = 0) -> int:
        """How many of the first `found` blocks to fetch. within: until they must be here. queued_bytes: what is fetched before them."""
        per_byte, per_token = self._byte.cost, self._token.cost
        if found <= 0 or within <= 0:
            return 0
        if per_byte is None:
            return found
        fetching = block_bytes * per_byte
        before = (self._trip.cost or 0.0) + queued_bytes * per_byte
        count = found if math.isinf(within) else min(found, int(max(0.0, within - before) / max(fetching, 1e-12)))
        if count and (per_token is None or count * block_tokens * per_token > before + count * fetching):
            return count
        if self._clock.now() - self._fetched_at >= self._policy.again_after:
            self._fetched_at = self._clock.now()
            return 1
        return 0
