"""Counts of values by size, as Prometheus wants them. Times are seconds."""

from __future__ import annotations

import itertools
from bisect import bisect_left

from prometheus_client.core import HistogramMetricFamily, Metric

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TRANSFER = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

TOKENS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Histogram:
    """Values counted by the first of `bounds` that they do not exceed, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound and how many values there are up to it."""
        return list(zip([*(str(float(bound)) for bound in self._bounds), "+Inf"], itertools.accumulate(self._counts), strict=True))

    def family(self, name: str, about: str, model: str) -> Metric:
        """Under `tokenmill:{name}`, of a served model."""
        family = HistogramMetricFamily(f"tokenmill:{name}", about, labels=("model_name",))
        family.add_metric((model,), self.buckets(), self.sum)
        return family
