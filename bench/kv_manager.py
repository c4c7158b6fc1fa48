"""What the scheduler and the KV manager cost per engine step, without a model.

    python bench/kv_manager.py [--json]

Prints microseconds per operation, and for whole steps their share of a 4 ms step (a small model decoding 32 sequences).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import FRAME, SamplingParams
from tokenmill.kv.groups import KVGroup, Whole
from tokenmill.kv.manager import KVManager
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence

STEP_US = 4000.0
FRAMES = 100_000
RANDOM = random.Random(1)


def prompt(n_tokens: int) -> list[int]:
    return [RANDOM.randrange(50_000) for _ in range(n_tokens)]


def manager(n_frames: int = FRAMES) -> KVManager:
    return KVManager([KVGroup("whole", Whole(), ((0, 0),))], n_frames, BlockManagerConfig())


def microseconds(work: Callable[[], object], repeat: int) -> float:
    """Median time of one call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def loaded(n_sequences: int, context: int, waiting: int = 0, n_frames: int = FRAMES) -> Scheduler:
    """A scheduler whose sequences decode at about `context` tokens, with others queued behind them."""
    scheduler = Scheduler(manager(n_frames), Limits(n_sequences, 1 << 30))
    params = SamplingParams(max_tokens=4096)
    for number in range(n_sequences + waiting):
        tokens = prompt(context - RANDOM.randrange(64) if number < n_sequences else 16)
        scheduler.add(Sequence(f"r{number}", 0, tokens, params, 0, arrival=float(number)))
    return scheduler


def step(scheduler: Scheduler) -> None:
    work = scheduler.schedule(0.0)
    assert work is not None
    scheduler.commit(work, {item.sequence: [17] for item in work if item.samples})


def decode_step(n_sequences: int, context: int, waiting: int = 0) -> float:
    scheduler = loaded(n_sequences, context, waiting)
    step(scheduler)
    return statistics.fmean(microseconds(lambda: step(scheduler), 1) for _ in range(400))


def decode_step_with_blocked_head(n_sequences: int, context: int, head: int) -> float:
    """The head of the queue is looked up in every step, but there are no frames for it."""
    scheduler = loaded(n_sequences, context, n_frames=n_sequences * (context // FRAME + 60))
    scheduler.limits = Limits(n_sequences + 1, 1 << 30)
    step(scheduler)
    scheduler.add(Sequence("head", 0, prompt(head), SamplingParams(max_tokens=1), 0, arrival=1e9))
    cost = statistics.fmean(microseconds(lambda: step(scheduler), 1) for _ in range(400))
    assert scheduler.n_waiting == 1
    return cost


def admission(n_tokens: int, hit: bool) -> float:
    kv = manager()
    known = prompt(n_tokens)
    times = []
    for number in range(30):
        tokens = known if hit else prompt(n_tokens)
        start = time.perf_counter()
        kv.acquire(number, tokens, "")
        kv.reserve(number, n_tokens + 1)
        kv.commit(number, tokens, n_tokens)
        kv.release(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def eviction(leaf_frames: int) -> float:
    """Evict one frame and use it, in a pool that is full of cached runs."""
    kv = manager()
    for number in range(FRAMES // leaf_frames):
        kv.acquire(number, tokens := prompt(leaf_frames * FRAME), "")
        kv.reserve(number, len(tokens))
        kv.commit(number, tokens, len(tokens))
        kv.release(number)
    assert kv.n_free < leaf_frames
    kv.acquire("user", [1], "")
    kv.reserve("user", kv.n_free * FRAME)
    covered = iter(range(kv.covered("user") + 1, 1 << 30, FRAME))
    cost = microseconds(lambda: kv.reserve("user", next(covered)), 2000)
    assert kv.n_evictions >= 2000
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    steps = {
        "decode step, 1 sequence of 500 tokens": decode_step(1, 500),
        "decode step, 32 sequences of 500 tokens": decode_step(32, 500),
        "decode step, 32 sequences of 8,000 tokens": decode_step(32, 8000),
        "decode step, 32 sequences, 10,000 waiting": decode_step(32, 500, waiting=10_000),
        "decode step, 32 sequences, a blocked head of 4,000 tokens": decode_step_with_blocked_head(32, 500, 4000),
    }
    operations = {
        "decode step, 256 sequences of 500 tokens": decode_step(256, 500),
        "prompt of 500 tokens, nothing cached": admission(500, hit=False),
        "prompt of 500 tokens, all cached": admission(500, hit=True),
        "prompt of 8,000 tokens, nothing cached": admission(8000, hit=False),
        "prompt of 8,000 tokens, all cached": admission(8000, hit=True),
        "one frame by eviction, 100,000 frames in 1,000 runs": eviction(100),
        "one frame by eviction, 100,000 frames in 25,000 runs": eviction(4),
    }
    if as_json:
        print(json.dumps({"step_us": steps, "operation_us": operations, "reference_step_us": STEP_US}))
        return
    for name, cost in steps.items():
        print(f"{name:<62} {cost:9.1f} us {cost / STEP_US:7.2%} of a 4 ms step")
    for name, cost in operations.items():
        print(f"{name:<62} {cost:9.1f} us")


if __name__ == "__main__":
    main()
