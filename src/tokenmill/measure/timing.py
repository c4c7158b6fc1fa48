"""How long something takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from tokenmill.kernels.ceilings import multiply_bf16, multiply_int8, read
from tokenmill.kernels.native import Pool
from tokenmill.measure.machine import largest_cache
from tokenmill.measure.report import Ceilings

LOOP_SECONDS = 0.02
"""Of one run of a loop in registers: far longer than starting it on all threads takes."""

CEILING_RUNS = 9


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_seconds(work: Callable[[], object], runs: int = 5, at_least: float = 0.0) -> float:
    """Median time of one call, after one that does not count, over `runs` calls and `at_least` that many seconds."""
    work()
    times: list[float] = []
    while len(times) < runs or sum(times) < at_least:
        times.append(seconds_of(work))
    return statistics.median(times)


def measure_ceilings(pool: Pool) -> Ceilings:
    """What this machine reaches at best with the pool's threads and variant: the best of several runs, since anything
    that disturbs one makes it slower."""
    # No two pages are alike, so that nothing between us and the memory can keep one copy of them.
    data = np.arange(max(1 << 28, 8 * largest_cache()) // 8, dtype=np.uint64).view(np.uint8)
    reading = min(seconds_of(lambda: read(pool, data)) for _ in range(CEILING_RUNS))
    return Ceilings(data.nbytes / reading, _loop_rate(multiply_int8, pool), _loop_rate(multiply_bf16, pool))


def _loop_rate(loop: Callable[[Pool, int], float], pool: Pool) -> float:
    rounds, rates = 1024, [0.0]
    while len(rates) <= CEILING_RUNS:
        started = time.perf_counter()
        operations = loop(pool, rounds)
        seconds = time.perf_counter() - started
        if seconds < LOOP_SECONDS:
            rounds *= 2
        else:
            rates.append(operations / seconds)
    return max(rates)
