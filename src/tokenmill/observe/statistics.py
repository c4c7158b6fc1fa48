"""Numbers from many measurements. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Of `n` values, in their unit."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, by linear interpolation between the two nearest."""
    assert values, "no value, no percentile"
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarise(values: Sequence[float]) -> Summary | None:
    """None of no values."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
    return Summary(len(values), sum(values) / len(values), p50, p90, p99, max(values))
