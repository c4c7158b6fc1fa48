"""Promise 1 with a KV store: what comes from it is as good as computed, and whatever is wrong with it changes no bit of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import serve, until_nothing_is_held, workers
from request_pool import RequestPool

from tokenmill.cluster.local import Cluster
from tokenmill.core.kv_spelling import Format, kv_settings
from tokenmill.core.messages import Generate, StoreStats
from tokenmill.core.roles import Role
from tokenmill.core.types import SamplingParams
from tokenmill.transfer.store.embedded import EmbeddedPolicy, EmbeddedServer
from tokenmill.weights.catalogue import resolve

FLEETS = {"mixed": [Role.MIXED, Role.MIXED], "separate": [Role.PREFILL, Role.DECODE, Role.DECODE]}


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer.started() as server:
        yield server


def kept_in(**store: Any) -> dict[str, Any]:
    return {"kv_store_config": store}


async def told(cluster: Cluster) -> dict[str, StoreStats]:
    return {engine.name: engine.stats.store for engine in await cluster.stats(5) if engine.stats.store is not None}


async def until_all_is_written(cluster: Cluster) -> None:
    async with asyncio.timeout(60):
        while any(one.counts["offered"] > one.counts["written"] + one.counts["unwritten"] for one in (await told(cluster)).values()):
            await asyncio.sleep(0.02)


def kill(cluster: Cluster, name: str) -> None:
    info = cluster.workers.get(name)
    if info is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(info.pid, signal.SIGKILL)


async def until_all_are_back(cluster: Cluster, count: int, restarts: int) -> None:
    async with asyncio.timeout(60):
        while cluster.restarts < restarts or len(cluster.workers) < count:
            await asyncio.sleep(0.02)


def recovered(cluster: Cluster) -> tuple[int, float]:
    """Streams that were gone on with elsewhere, and the tokens that were computed again for all of them."""
    (family,) = (one for one in cluster.metrics.families("m") if one.name == "tokenmill:recovery_recomputed_tokens")
    found = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples if not sample.name.endswith("_bucket")}
    return int(found["count"]), found["sum"]


@pytest.mark.parametrize("fleet", FLEETS)
async def test_workers_that_are_started_anew_have_what_those_before_them_computed(
    pool: RequestPool, server: EmbeddedServer, fleet: str
) -> None:
    roles = FLEETS[fleet]
    async with workers(pool.alone.model, roles, {"connector": "shm"}, cache=kept_in(url=server.url)) as cluster:
        await serve(cluster, pool, [*pool.short, *pool.long], seed=1, count=30)
        await until_all_is_written(cluster)
        for name in list(cluster.workers):
            kill(cluster, name)
        await until_all_are_back(cluster, len(roles), len(roles))
        await serve(cluster, pool, pool.long, seed=1, count=10)
        await until_nothing_is_held(cluster)
        stats = await told(cluster)
    assert sum(one.fetched_tokens for one in stats.values()) >= 448
    assert not any(value for one in stats.values() for name, value in one.counts.items() if name.startswith("rejected"))


@pytest.mark.parametrize("fleet", FLEETS)
async def test_a_killed_stream_computes_at_most_a_block_again(pool: RequestPool, tmp_path: Path, fleet: str) -> None:
    """Prompt and output both: the store has what the worker that was killed had decoded, too."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=400, ignore_eos=True)
    prompt = list(pool.long[0].prompt)
    async with workers(pool.alone.model, FLEETS[fleet], {"connector": "shm"}, cache=kept_in(folder=str(tmp_path))) as cluster:

        async def ask(name: str, *, disturbed: bool) -> list[int]:
            tokens: list[int] = []
            generate = Generate(request_id=name, prompt=prompt, params=params, cache_salt=name)
            async with contextlib.aclosing(cluster.generate(generate)) as outputs:
                async for output in outputs:
                    tokens += output.tokens
                    if disturbed and len(tokens) >= 200:
                        disturbed = False
                        await until_all_is_written(cluster)
                        kill(cluster, next(e.name for e in await cluster.stats(5) if e.stats.running))
            return tokens

        expected = await asyncio.wait_for(ask("a", disturbed=False), 120)
        assert recovered(cluster) == (0, 0)
        assert await asyncio.wait_for(ask("b", disturbed=True), 120) == expected
        count, tokens = recovered(cluster)
        assert count == 1
        assert 0 < tokens <= 64 + 64, "a block that was not full, and what was put out while the last one was written"
        await until_nothing_is_held(cluster)


async def test_workers_that_are_killed_over_and_over(pool: RequestPool, server: EmbeddedServer) -> None:
    rng = random.Random(3)
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE, Role.MIXED]
    async with workers(pool.alone.model, roles, {"connector": "shm"}, cache=kept_in(url=server.url)) as cluster:

        async def murder() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.4, 1.2))
                kill(cluster, f"w{rng.randrange(len(roles))}")

        killing = asyncio.create_task(murder())
        try:
            await serve(cluster, pool, [*pool.talkative, *pool.long], seed=4, count=35)
        finally:
            killing.cancel()
        await until_nothing_is_held(cluster)
        assert recovered(cluster)[0] > 0


async def test_a_store_that_dies_is_damaged_and_comes_back(pool: RequestPool, tmp_path: Path) -> None:
    """A folder whose files are overwritten, and a server that is killed and starts again, empty, while both are in use."""
    rng = random.Random(6)
    with EmbeddedServer.started(EmbeddedPolicy(memory=64 << 20)) as server:
        store = kept_in(url=server.url, folder=str(tmp_path))
        async with workers(pool.alone.model, [Role.MIXED, Role.MIXED], {"connector": "shm"}, memory_gb=0.06, cache=store) as cluster:

            async def harm() -> None:
                while True:
                    await asyncio.sleep(rng.uniform(0.1, 0.4))
                    if rng.random() < 0.2:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(server.pid, signal.SIGKILL)
                    found = [path for path in tmp_path.rglob("*") if path.is_file()]
                    for file in rng.sample(found, min(8, len(found))):
                        with contextlib.suppress(OSError), file.open("r+b") as entry:
                            entry.seek(rng.randrange(max(1, file.stat().st_size)))
                            entry.write(rng.randbytes(3))

            harming = asyncio.create_task(harm())
            try:
                await serve(cluster, pool, pool.long, seed=7, count=24)
            finally:
                harming.cancel()
            await until_nothing_is_held(cluster)
            stats = await told(cluster)
    assert sum(one.fetched_tokens for one in stats.values()) > 0
    assert sum(one.counts["rejected_corrupt"] + one.counts["disk_flawed"] for one in stats.values()) > 0
    assert not harming.done() or harming.cancelled(), harming.exception()


async def test_what_falls_out_of_a_small_cache_is_fetched_in_compressed_form(smollm2_path: Path, tmp_path: Path) -> None:
    cache = kv_settings(Format.parse("int8/int4"), None, None)
    pool = RequestPool(smollm2_path, 21, n_short=4, n_talkative=4, n_long=4, cache=cache)
    store = cache | kept_in(folder=str(tmp_path))
    async with workers(smollm2_path, [Role.MIXED], {"connector": "shm"}, memory_gb=0.02, cache=store) as cluster:
        await serve(cluster, pool, [*pool.long, *pool.talkative], seed=8, count=24)
        await until_nothing_is_held(cluster)
        assert (await told(cluster))["w0"].fetched_tokens > 0


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["gemma3:270m", "qwen2.5-coder:0.5b"])
async def test_other_models(model: str, server: EmbeddedServer) -> None:
    pool = RequestPool(resolve(model), 12, n_short=6, n_talkative=3, n_long=5)
    roles = [Role.PREFILL, Role.DECODE, Role.MIXED]
    async with workers(resolve(model), roles, {"connector": "shm"}, memory_gb=0.5, cache=kept_in(url=server.url)) as cluster:
        for seed in (5, 6):
            await serve(cluster, pool, [*pool.short, *pool.long, *pool.talkative], seed=seed, count=30)
            await until_all_is_written(cluster)
            for name in list(cluster.workers):
                kill(cluster, name)
            await until_all_are_back(cluster, len(roles), len(roles) * (seed - 4))
        await serve(cluster, pool, [*pool.short, *pool.long], seed=7, count=30)
        await until_nothing_is_held(cluster)
        assert sum(one.fetched_tokens for one in (await told(cluster)).values()) > 0
