"""Real worker processes, and real requests to them whose answers are held against those of the run alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from comparison import Answer
from request_pool import RequestPool
from traffic import Request

from tokenmill.cluster.course import CoursePolicy
from tokenmill.cluster.division import WorkerPlan
from tokenmill.cluster.local import Cluster
from tokenmill.cluster.separation import SeparationPolicy
from tokenmill.cluster.supervisor import RestartPolicy
from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import Generate
from tokenmill.core.roles import Role

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
