"""Promise 1 across processes: who computes a prompt, who decodes, and who dies meanwhile changes no bit of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import socket
from pathlib import Path

import pytest
from fleets import ALWAYS, PATIENCE, link_of, serve, until_nothing_is_held, workers
from request_pool import RequestPool
from serving import TOKENMILL

from tokenmill.cluster.clusters import Clusters
from tokenmill.cluster.joining import Listening
from tokenmill.cluster.local import Cluster
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.kv_spelling import Format, kv_settings
from tokenmill.core.proof import read_secret
from tokenmill.core.roles import Role
from tokenmill.weights.catalogue import resolve


@pytest.mark.parametrize("connector", ["shm", "tcp", "nixl"])
async def test_prompts_are_computed_by_one_process_and_gone_on_with_by_another(pool: RequestPool, connector: str, tmp_path: Path) -> None:
    if connector == "nixl":
        pytest.importorskip("nixl")
    roles = [Role.PREFILL, Role.DECODE]
    async with workers(pool.alone.model, roles, link_of(connector, tmp_path)) as cluster:
        await serve(cluster, pool, [*pool.short, *pool.long], seed=1, count=40)
        told = await until_nothing_is_held(cluster)
        assert told["w1"].reads > 5
        assert told["w0"].leases_ended["taken"] > 0


async def test_in_compressed_form(smollm2_path: Path, tmp_path: Path) -> None:
    cache = kv_settings(Format.parse("int8/int4"), None, None)
    pool = RequestPool(smollm2_path, 11, n_short=8, n_talkative=0, n_long=2, cache=cache)
    async with workers(smollm2_path, [Role.PREFILL, Role.DECODE], {"connector": "shm"}, cache=cache) as cluster:
        await serve(cluster, pool, [*pool.short, *pool.long], seed=2, count=20)
        assert (await until_nothing_is_held(cluster))["w1"].reads > 5


@pytest.mark.parametrize("roles", [[Role.PREFILL, Role.DECODE], [Role.MIXED, Role.MIXED]], ids=["one way", "both ways"])
async def test_where_frames_are_scarce(pool: RequestPool, roles: list[Role]) -> None:
    """Reservations wait for room, leases and reservations give way to sequences that run, and these are preempted. Two workers that both
    reserve do not wait for each other's frames."""
    async with workers(pool.alone.model, roles, {"connector": "shm"}, memory_gb=0.045) as cluster:
        await serve(cluster, pool, [*pool.long, *pool.talkative], seed=3, count=30)
        await until_nothing_is_held(cluster)


@pytest.mark.parametrize("victims", [[0], [2], [0, 1, 2, 3]], ids=["a prefill worker", "a decode worker", "any"])
async def test_workers_that_are_killed_over_and_over(pool: RequestPool, victims: list[int]) -> None:
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    rng = random.Random(len(victims))
    async with workers(pool.alone.model, roles, {"connector": "shm"}) as cluster:

        async def kill() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.4, 1.2))
                info = cluster.workers.get(f"w{rng.choice(victims)}")
                if info is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(info.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        try:
            await serve(cluster, pool, [*pool.short, *pool.long], seed=4, count=50)
        finally:
            killing.cancel()
        await until_nothing_is_held(cluster)
        assert cluster.restarts > 0


async def test_streams_that_migrate_over_and_over(pool: RequestPool) -> None:
    rng = random.Random(5)
    async with workers(pool.alone.model, [Role.PREFILL, Role.DECODE, Role.DECODE], {"connector": "shm"}) as cluster:
        moved = 0

        async def migrate() -> None:
            nonlocal moved
            while True:
                await asyncio.sleep(rng.uniform(0.02, 0.2))
                moved += cluster.migrate(f"w{rng.randrange(1, 3)}")

        migrating = asyncio.create_task(migrate())
        try:
            await serve(cluster, pool, [*pool.talkative, *pool.long, *pool.short], seed=6, count=50)
        finally:
            migrating.cancel()
        told = await until_nothing_is_held(cluster)
        assert moved > 20
        assert sum(told[name].leases_ended.get("taken", 0) for name in ("w1", "w2")) > 0, "frames went from one to the other"


@pytest.mark.parametrize("name", ["w0", "w1"])
async def test_a_worker_that_is_removed_lets_go_of_all_it_has(pool: RequestPool, name: str) -> None:
    async with workers(pool.alone.model, [Role.PREFILL, Role.DECODE, Role.DECODE], {"connector": "shm"}) as cluster:
        serving = asyncio.create_task(serve(cluster, pool, [*pool.talkative, *pool.long], seed=7, count=30))
        await asyncio.sleep(0.5)
        pid = cluster.workers[name].pid
        await asyncio.wait_for(cluster.remove(name), 60)
        assert not Path(f"/proc/{pid}").exists()
        await serving
        assert list(cluster.workers) == [each for each in ("w0", "w1", "w2") if each != name]
        assert cluster.restarts == 0
        with pytest.raises(InvalidRequest, match="there is no worker"):
            await cluster.remove(name)


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["gemma3:270m", "qwen2.5-coder:0.5b"])
async def test_other_models(model: str) -> None:
    pool = RequestPool(resolve(model), 12, n_short=10, n_talkative=0, n_long=5)
    async with workers(resolve(model), [Role.PREFILL, Role.DECODE, Role.MIXED], {"connector": "shm"}, memory_gb=0.5) as cluster:
        await serve(cluster, pool, [*pool.short, *pool.long], seed=5, count=60)
        await until_nothing_is_held(cluster)


async def test_workers_that_have_joined_by_tcp(pool: RequestPool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(16))
    listening = Listening(socket.create_server(("127.0.0.1", 0)), read_secret(str(secret)))
    port = listening.sock.getsockname()[1]
    config = EngineConfig.from_settings(model=str(pool.alone.model), served_name="m")
    cluster = Cluster(config, [], separation=ALWAYS, joining=True)
    clusters = Clusters([cluster], listening)
    sizes = ["--threads", "1", "--max-model-len", "1800", "--kv-memory-gb", "0.6", "--served-model-name", "m"]
    sizes += ["--kv-store-folder", str(tmp_path / "store")]
    command = [*TOKENMILL, "worker", str(pool.alone.model), "--join", f"127.0.0.1:{port}", "--secret-file", str(secret), *sizes]
    processes = [await asyncio.create_subprocess_exec(*command, "--role", role, "--name", role) for role in ("prefill", "decode")]
    try:
        clusters.open()
        await cluster.start()
        async with asyncio.timeout(PATIENCE):
            while len(cluster.workers) < 2:
                await asyncio.sleep(0.01)
        assert {info.address.partition(":")[0] for info in cluster.workers.values()} == {"tcp"}
        await serve(cluster, pool, [*pool.short, *pool.long], seed=6, count=30)
        told = await until_nothing_is_held(cluster)
        assert told["decode"].reads > 5
        for member in list(cluster._dispatcher.members):
            member.client.cut()
        async with asyncio.timeout(PATIENCE):
            while len(cluster.workers) < 2:
                await asyncio.sleep(0.01)
        await serve(cluster, pool, pool.short, seed=7, count=5)
        assert all(engine.stats.store is not None for engine in await cluster.stats(5))
        assert any((tmp_path / "store").iterdir()), "what they computed is kept, also for those who join later"
        for process in processes:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await clusters.stop(0)
