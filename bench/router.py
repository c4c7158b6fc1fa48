"""What the router and what it looks at cost, without workers.

    python bench/router.py [--workers 100] [--requests 10000] [--decisions 3000] [--json]

Microseconds of processor time. A decision is one `Router.choose` among all workers, with requests given and ending between decisions;
median and 99th percentile per strategy stand beside the limit. Prompts have 8,192 tokens, of which some workers know a part, if nothing
else is said. Then what follows each decision or message: a gift, its progress, its end, and what a tick of the fleet takes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable

from tokenmill.cluster.fleet import Fleet
from tokenmill.cluster.prefixes import PrefixIndex
from tokenmill.cluster.registry import Worker
from tokenmill.cluster.router import RouterPolicy
from tokenmill.cluster.strategies import STRATEGIES, RouteRequest
from tokenmill.core.blocks import BLOCK, block_hashes
from tokenmill.core.clock import ManualClock
from tokenmill.core.roles import Role

LIMIT_US = 100.0
PROMPT = 8192
LONG = 131_072


def fleet_of(strategy: str, n_workers: int, n_requests: int, rng: random.Random) -> Fleet:
    """Workers with as many live requests as asked, half of them decoding."""
    fleet = Fleet(ManualClock(), router=RouterPolicy(routing_strategy=strategy))
    for number in range(n_workers):
        fleet.join(
            Worker(
                id=f"worker-{number}",
                role=Role.MIXED,
                model="model",
                fingerprint="f",
                boot="b",
                address="",
                max_model_len=2 * LONG,
                max_batch_size=256,
                kv_tokens=10_000_000,
            )
        )
    for key in range(n_requests):
        fleet.loads.give(key, f"worker-{rng.randrange(n_workers)}", Role.MIXED, prompt_tokens=rng.randrange(1, PROMPT))
        if key % 2:
            fleet.loads.output(key)
    return fleet


def prompts(fleet: Fleet, n_workers: int, tokens: int, rng: random.Random) -> list[RouteRequest]:
    """Fifty prompts, each known to some workers up to some block."""
    found = []
    for number in range(50):
        hashes = block_hashes([number] * tokens, "", "f")
        for _ in range(rng.randrange(12)):
            fleet.prefixes.add(f"worker-{rng.randrange(n_workers)}", hashes[: rng.randrange(len(hashes))])
        found.append(RouteRequest(model="model", prompt_tokens=tokens, hashes=hashes))
    return found


def decisions(fleet: Fleet, requests: list[RouteRequest], n_requests: int, number: int, rng: random.Random) -> list[float]:
    """Microseconds of each; between two of them one request is given and one of those that live ends."""
    times = []
    live = list(range(n_requests))
    for key in range(n_requests, n_requests + number):
        request = rng.choice(requests)
        start = time.thread_time_ns()
        choice = fleet.router.choose(request, Role.MIXED)
        times.append((time.thread_time_ns() - start) / 1000)
        fleet.loads.give(key, choice.found().id, Role.MIXED, prompt_tokens=request.prompt_tokens)
        at = rng.randrange(n_requests)
        fleet.loads.end(live[at])
        live[at] = key
    return times


def measured_decisions(n_workers: int, n_requests: int, number: int) -> dict[str, list[float]]:
    found = {}
    for strategy in STRATEGIES:
        rng = random.Random(1)
        fleet = fleet_of(strategy, n_workers, n_requests, rng)
        found[strategy] = decisions(fleet, prompts(fleet, n_workers, PROMPT, rng), n_requests, number, rng)
    rng = random.Random(1)
    fleet = fleet_of("prefix_aware", n_workers, n_requests, rng)
    requests = prompts(fleet, n_workers, LONG, rng)
    found[f"prefix_aware, prompts of {LONG:,} tokens"] = decisions(fleet, requests, n_requests, number, rng)
    fleet = fleet_of("min_decode_queue", n_workers, n_requests, rng)
    requests = [RouteRequest(model="model", prompt_tokens=PROMPT, session=f"session {number}") for number in range(1000)]
    found["min_decode_queue, in sessions"] = decisions(fleet, requests, n_requests, number, rng)
    fleet = fleet_of("min_decode_queue", n_workers, n_requests, rng)
    for at in range(0, n_workers, 10):
        fleet.health.ended(f"worker-{at}", "b")
    for at in range(5, n_workers, 10):
        for _ in range(3):
            fleet.breakers.failed(fleet.breakers.begin(f"worker-{at}"))
    found["min_decode_queue, a fifth cannot be chosen"] = decisions(fleet, prompts(fleet, n_workers, PROMPT, rng), n_requests, number, rng)
    return found


def each(work: Callable[[int], object], number: int) -> float:
    """Mean microseconds of one of `number` calls."""
    start = time.thread_time_ns()
    for at in range(number):
        work(at)
    return (time.thread_time_ns() - start) / 1000 / number


def measured_updates(n_workers: int, n_requests: int) -> dict[str, float]:
    fleet = fleet_of("prefix_aware", n_workers, n_requests, random.Random(1))
    names = [f"worker-{at % n_workers}" for at in range(n_requests)]
    loads, tokens = fleet.loads, list(range(PROMPT))
    chain = block_hashes(tokens, "", "f")
    return {
        "one token put out": each(loads.output, n_requests),
        "a request ends": each(loads.end, n_requests),
        "a request is given": each(lambda at: loads.give(at, names[at], Role.MIXED, prompt_tokens=PROMPT), n_requests),
        "the output of a step is heard": each(lambda at: fleet.health.stepped(names[at], "b"), n_requests),
        "a tick of the fleet": each(lambda at: fleet.tick(), 100),
        f"a prompt of {PROMPT:,} tokens is hashed": each(lambda at: block_hashes(tokens, "", "f"), 30),
        f"its {len(chain)} blocks enter the index": each(lambda at: fleet.prefixes.add(names[at], chain), n_workers),
    }


def index_bytes(room: int) -> float:
    """Of memory per pair of a block and a worker in a full index, each block with one worker."""
    tracemalloc.start()
    index = PrefixIndex(room)
    for number in range(room // 100 + 100):
        index.add(f"worker-{number % 100}", [number.to_bytes(8, "little") + at.to_bytes(8, "little") for at in range(100)])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(index)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--requests", type=int, default=10_000, help="that live")
    parser.add_argument("--decisions", type=int, default=3000, help="of each strategy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = {
        name: (statistics.median(times), statistics.quantiles(times, n=100)[98])
        for name, times in measured_decisions(options.workers, options.requests, options.decisions).items()
    }
    updates, per_pair = measured_updates(options.workers, options.requests), index_bytes(RouterPolicy().prefix_blocks // 10)
    if options.json:
        timed = {name: {"median": median, "p99": p99} for name, (median, p99) in found.items()}
        print(json.dumps({"decision_us": timed, "limit_us": LIMIT_US, "update_us": updates, "index_bytes_per_pair": per_pair}))
        return
    print(f"{options.workers} workers, {options.requests:,} live requests")
    print(f"{'a decision, us':<46} {'median':>8} {'p99':>8} {'limit':>8} {'p99/limit':>10}")
    for name, (median, p99) in found.items():
        print(f"{name:<46} {median:8.1f} {p99:8.1f} {LIMIT_US:8.0f} {p99 / LIMIT_US:10.2f}")
    print()
    for name, us in updates.items():
        print(f"{name:<46} {us:8.1f} us")
    print(f"{'the index of prefixes':<46} {per_pair:8.0f} bytes per pair of a block ({BLOCK} tokens) and a worker")


if __name__ == "__main__":
    main(sys.argv[1:])
