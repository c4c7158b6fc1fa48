"""What a KV store gives to those who wait, and what it takes from the others.

    python bench/store_serving.py [MODEL] [--prompts 512,2048] [--rounds 3] [--json]

Needs the extra `store`. A worker process beside an embedded server, one beside a folder, and one without a store, in turns, each with all
CPUs. First tokens of a prompt that nobody has (computed), that the worker itself has (cached), and that the worker before it had (after a
kill), of which cached is the floor: nothing is brought faster than what is there. Then the pause of a stream whose worker is killed after
200 tokens, and the tokens that are computed again. Last, tokens per second of 8 requests at a time that find nothing: what storing takes.
Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from tokenmill.cluster.division import Workers, divide
from tokenmill.cluster.keeping import with_store
from tokenmill.cluster.local import Cluster
from tokenmill.core.config import EngineConfig
from tokenmill.core.cpus import usable_cpus
from tokenmill.core.memory import available_memory
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.weights.catalogue import resolve

OUTPUT, KILLED_AT, STREAMS = 300, 200, 8


class Bench:
    """One cluster of one worker."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._vocab = cluster.info.vocab_size
        self._number = 0

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(1000, self._vocab - 1000) for _ in range(length)]

    async def ask(self, prompt: list[int], tokens: int = 1, kill_at: int | None = None) -> list[float]:
        """When each token came, after the question."""
        self._number += 1
        params = SamplingParams(max_tokens=tokens, seed=0, temperature=0.0, ignore_eos=True)
        began, came = time.perf_counter(), []
        async with aclosing(self._cluster.generate(Generate(request_id=f"r{self._number}", prompt=prompt, params=params))) as outputs:
            async for output in outputs:
                came += [time.perf_counter() - began] * len(output.tokens)
                if kill_at is not None and len(came) >= kill_at:
                    kill_at = None
                    await self.settle()
                    self.kill()
        return came

    async def settle(self) -> None:
        """Until all is stored that was computed."""
        while True:
            (engine,) = await self._cluster.stats(5)
            counts = {} if engine.stats.store is None else engine.stats.store.counts
            if not counts or counts["offered"] == counts["written"] + counts["unwritten"]:
                return
            await asyncio.sleep(0.002)

    def kill(self) -> None:
        (info,) = self._cluster.workers.values()
        os.kill(info.pid, signal.SIGKILL)

    async def replaced(self) -> None:
        """The worker is killed, and the next one is there."""
        await self.settle()
        restarts = self._cluster.restarts
        self.kill()
        while self._cluster.restarts == restarts or not self._cluster.workers:
            await asyncio.sleep(0.002)

    def recomputed(self) -> float:
        (family,) = (one for one in self._cluster.metrics.families("m") if one.name.endswith("recovery_recomputed_tokens"))
        return next(sample.value for sample in family.samples if sample.name.endswith("_sum"))


@asynccontextmanager
async def running(model: str, store: dict[str, Any] | None, rng: random.Random) -> AsyncIterator[Bench]:
    settings: dict[str, Any] = {"kv_store_config": store, "kv_cache_config": {"memory_budget_gb": 2.0}}
    (config,), server = with_store([EngineConfig.from_settings(model=model, **settings)])
    with server or contextlib.nullcontext():
        cluster = Cluster(config, divide(config, Workers(mixed=1), usable_cpus(), available_memory()))
        try:
            await cluster.start()
            bench = Bench(cluster, rng)
            await bench.ask(bench.prompt(64), 8)
            yield bench
        finally:
            await cluster.stop(5)


async def measure(model: str, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, dict[str, Any] | None] = {"none": None, "embedded": {"url": "embedded"}, "folder": {"folder": folder}}
        for _ in range(rounds):
            for name, store in stores.items():
                async with running(model, store, rng) as bench:
                    for length in lengths:
                        prompt = bench.prompt(length)
                        found[name, f"TTFT {length} computed"].append((await bench.ask(prompt))[0])
                        found[name, f"TTFT {length} cached"].append((await bench.ask(prompt))[0])
                        await bench.replaced()
                        found[name, f"TTFT {length} after a kill"].append((await bench.ask(prompt))[0])
                    before = bench.recomputed()
                    came = await bench.ask(bench.prompt(lengths[-1]), OUTPUT, kill_at=KILLED_AT)
                    found[name, "pause of a killed stream"].append(max(b - a for a, b in itertools.pairwise(came)))
                    found[name, "tokens computed again"].append(bench.recomputed() - before)
                    began = time.perf_counter()
                    await asyncio.gather(*(bench.ask(bench.prompt(lengths[0]), 128) for _ in range(STREAMS)))
                    found[name, "tokens/s, nothing found"].append(STREAMS * (lengths[0] + 128) / (time.perf_counter() - began))
    return [{"store": store, "what": what, "value": statistics.median(values)} for (store, what), values in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    path, lengths = str(resolve(asked.model)), [int(length) for length in asked.prompts.split(",")]
    rows = asyncio.run(measure(path, lengths, asked.rounds))
    if asked.json:
        print(json.dumps(rows))
        return
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        table[row["what"]][row["store"]] = row["value"]
    print(f"{asked.model}\n{'':<28} {'none':>10} {'embedded':>10} {'folder':>10}   embedded/none  folder/none")
    for what, by in table.items():
        scale = 1e3 if what.startswith(("TTFT", "pause")) else 1
        cells = " ".join(f"{scale * by[name]:10.1f}" for name in ("none", "embedded", "folder"))
        ratios = "  ".join(f"{by[name] / by['none']:12.3f}" if by["none"] else f"{'':>12}" for name in ("embedded", "folder"))
        print(f"{what:<28} {cells} {ratios}")


if __name__ == "__main__":
    main()
