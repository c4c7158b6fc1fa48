"""Promise 1 across processes: who computes a prompt, who decodes, and who dies meanwhile changes no bit of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from comparison import Answer
from request_pool import RequestPool
from serving import TOKENMILL
from traffic import Request

from tokenmill.cluster.clusters import Clusters
from tokenmill.cluster.course import CoursePolicy
from tokenmill.cluster.division import WorkerPlan
from tokenmill.cluster.joining import Listening
from tokenmill.cluster.local import Cluster
from tokenmill.cluster.separation import SeparationPolicy
from tokenmill.cluster.supervisor import RestartPolicy
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.kv_spelling import Format, kv_settings
from tokenmill.core.messages import Generate
from tokenmill.core.proof import read_secret
from tokenmill.core.roles import Role
from tokenmill.weights.catalogue import resolve

ALWAYS = SeparationPolicy(always=True, min_tokens=9)
PATIENT = CoursePolicy(losses=100)
POLICY = RestartPolicy(first_delay=0.01, longest_delay=0.05)
PATIENCE = 240.0
SIZES: dict[Role, dict[str, Any]] = {
    Role.PREFILL: {"chunk_size": 80, "block_manager_config": {"block_size": 64}},
    Role.DECODE: {"chunk_size": 48, "max_batch_size": 16, "block_manager_config": {"block_size": 8}},
    Role.MIXED: {"chunk_size": 256},
}
"""Workers differ in all that may differ."""


@contextlib.asynccontextmanager
async def workers(
    model: Path, roles: Sequence[Role], link: dict[str, Any], memory_gb: float = 0.6, cache: dict[str, Any] | None = None
) -> AsyncIterator[Cluster]:
    plans = []
    for number, role in enumerate(roles):
        settings = {"kv_cache_config": {}} | (cache or {}) | SIZES[role]
        settings["kv_cache_config"] = settings["kv_cache_config"] | {"memory_budget_gb": memory_gb}
        config = EngineConfig.from_settings(
            model=str(model),
            max_model_len=1800,
            threads=1,
            kv_transfer_config=link | {"role": role.value, "worker": f"w{number}"},
            **settings,
        )
        plans.append(WorkerPlan(f"w{number}", role, config))
    cluster = Cluster(plans[-1].config, plans, policy=POLICY, course=PATIENT, separation=ALWAYS)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop(0)


async def ask(cluster: Cluster, request: Request, name: str, leave_after: int | None = None) -> list[Answer] | None:
    """One answer for each choice; None if it was left after so many outputs."""
    generate = Generate(
        request_id=name,
        prompt=list(request.prompt),
        params=request.params,
        eos_ids=request.eos_ids,
        cache_salt=name[-1],
        priority=len(name) % 3,
    )
    answers = [Answer() for _ in range(request.params.n)]
    async with contextlib.aclosing(cluster.generate(generate)) as outputs:
        async for output in outputs:
            answer = answers[output.choice]
            assert output.index == len(answer.tokens)
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs or []
            answer.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs
            answer.finish_reason, answer.stop_token = output.finish_reason, output.stop_token
            if leave_after is not None:
                leave_after -= 1
                if leave_after < 0:
                    return None
    return answers


async def serve(cluster: Cluster, pool: RequestPool, requests: Sequence[Request], seed: int, count: int) -> None:
    """Many requests, some of which are left, at random times; every answer must be that of the run alone."""
    rng = random.Random(seed)
    asking: list[tuple[Request, asyncio.Task[list[Answer] | None]]] = []
    for number in range(count):
        request, leave = rng.choice(requests), rng.randrange(12) if rng.random() < 0.15 else None
        asking.append((request, asyncio.create_task(ask(cluster, request, f"r{number}", leave))))
        await asyncio.sleep(rng.expovariate(1 / 0.02))
    for request, task in asking:
        answers = await asyncio.wait_for(task, PATIENCE)
        for answer, expected in zip(answers or (), pool.alone.answers(request), strict=False):
            assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs), (seed, request)
            assert (answer.finish_reason, answer.stop_token) == (expected.finish_reason, expected.stop_token), (seed, request)
            assert answer.prompt_logprobs == expected.prompt_logprobs, (seed, request)


async def until_nothing_is_held(cluster: Cluster) -> dict[str, Any]:
    """By name, what each worker says of its hand-overs."""
    async with asyncio.timeout(60):
        while True:
            engines = await cluster.stats(5)
            held = [(e.stats.kv_held, e.stats.handover.leases, e.stats.handover.reservations) for e in engines if e.stats.handover]
            if not any(map(any, held)) and all(engine.up for engine in engines):
                return {engine.name: engine.stats.handover for engine in engines}
            await asyncio.sleep(0.05)


def link_of(connector: str, tmp_path: Path) -> dict[str, Any]:
    if connector == "shm":
        return {"connector": connector}
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(16))
    return {"connector": connector, "secret_file": str(secret)}


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


async def test_where_frames_are_scarce(pool: RequestPool) -> None:
    """Reservations wait for room, leases and reservations give way to sequences that run, and these are preempted."""
    async with workers(pool.alone.model, [Role.PREFILL, Role.DECODE], {"connector": "shm"}, memory_gb=0.045) as cluster:
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
        for process in processes:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await clusters.stop(0)
