"""Requests and what becomes of them, over worker processes without a model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import scripted_engine
from scripted_engine import EOS

from tokenmill.cluster.division import WorkerPlan
from tokenmill.cluster.health import HealthPolicy
from tokenmill.cluster.local import Cluster
from tokenmill.cluster.supervisor import RestartPolicy, State
from tokenmill.core.errors import EngineDied, KVBudgetTooSmall, Unavailable
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.roles import Role
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.observe.engines import EngineStats

QUICK = RestartPolicy(first_delay=0.01, longest_delay=0.02, load_attempts=3)
PATIENCE = 20.0


@contextlib.asynccontextmanager
async def workers(
    number: int = 1,
    policy: RestartPolicy = QUICK,
    health: HealthPolicy | None = None,
    first: dict[str, object] | None = None,
    **script: object,
) -> AsyncIterator[Cluster]:
    """first: what else the first one's script has."""
    scripts = [script | (first or {}), *[script] * (number - 1)]
    plans = [WorkerPlan(f"mixed-{n}", Role.MIXED, scripted_engine.config(**each)) for n, each in enumerate(scripts)]
    cluster = Cluster(plans[-1].config, plans, command=scripted_engine.command(), policy=policy, health=health)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop(0)


def request(request_id: str = "a", prompt: bytes = b"abc", **params: object) -> Generate:
    params.setdefault("max_tokens", 1000)
    return Generate(request_id=request_id, prompt=list(prompt), eos_ids=(EOS,), params=SamplingParams(**params))  # type: ignore[arg-type]


async def collect(cluster: Cluster, *requests: Generate) -> list[SequenceOutput]:
    return [output async for output in cluster.generate(*requests)]


def tokens(outputs: Sequence[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def held(engines: Sequence[EngineStats]) -> int:
    return sum(engine.stats.kv_held for engine in engines)


async def until_idle(cluster: Cluster) -> None:
    """Until no worker holds anything. Steps of an engine order this: an abort is handled before the next question."""
    async with asyncio.timeout(PATIENCE):
        while held(await cluster.stats(5)):
            pass


def pids(cluster: Cluster) -> list[int]:
    return [info.pid for info in cluster.workers.values()]


async def test_a_request_gets_its_tokens_and_exactly_one_last_output() -> None:
    async with workers() as cluster:
        outputs = await collect(cluster, request())
        assert tokens(outputs) == [*b"abc", EOS]
        assert [output.finish_reason for output in outputs] == [None, None, None, FinishReason.STOP]
        await until_idle(cluster)


async def test_several_requests_with_several_choices_end_when_the_last_choice_has() -> None:
    async with workers() as cluster:
        outputs = await collect(cluster, request("a", b"xy", n=2), request("b", b"pqrst"))
        ends = [(o.request_id, o.choice) for o in outputs if o.finish_reason]
        assert sorted(ends) == [("a", 0), ("a", 1), ("b", 0)]


async def test_a_refused_request_raises_the_engines_error() -> None:
    async with workers(refuse="needs 9 frames of 8") as cluster:
        with pytest.raises(KVBudgetTooSmall, match="needs 9 frames of 8") as caught:
            await collect(cluster, request())
        assert caught.value.param == "max_tokens"


async def test_leaving_the_iteration_frees_the_request() -> None:
    async with workers() as cluster:
        async with contextlib.aclosing(cluster.generate(request(ignore_eos=True))) as outputs:
            await anext(outputs)
            assert held(await cluster.stats(5)) > 0
        await until_idle(cluster)


async def test_a_cancelled_consumer_frees_the_request() -> None:
    async with workers() as cluster:
        begun = asyncio.Event()

        async def consume() -> None:
            async for _ in cluster.generate(request(ignore_eos=True)):
                begun.set()

        task = asyncio.create_task(consume())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_idle(cluster)


async def test_an_aborted_choice_yields_nothing_more_and_the_other_goes_on() -> None:
    async with workers() as cluster:
        seen: dict[int, int] = {0: 0, 1: 0}
        async for output in cluster.generate(request(n=2, ignore_eos=True, max_tokens=50)):
            seen[output.choice] += len(output.tokens)
            if output.choice == 0 and seen[0] == 3:
                cluster.abort("a", 0, FinishReason.STOP)
        assert seen == {0: 3, 1: 50}


async def test_aborting_from_elsewhere_ends_the_iteration() -> None:
    async with workers(step_seconds=0.001) as cluster:
        count = 0

        async def consume() -> None:
            nonlocal count
            async for _ in cluster.generate(request(ignore_eos=True)):
                count += 1
                begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(consume())
        await begun.wait()
        cluster.abort("a")
        await asyncio.wait_for(task, 5)
        await until_idle(cluster)


@pytest.mark.parametrize("number", [1, 2])
async def test_requests_of_a_killed_worker_go_on_where_they_were(number: int) -> None:
    async with workers(number, step_seconds=0.005) as cluster:
        prompts = [bytes(range(65 + n, 91)) for n in range(6)]
        running = [asyncio.create_task(collect(cluster, request(str(n), prompt))) for n, prompt in enumerate(prompts)]
        await asyncio.sleep(0.04)
        os.kill(pids(cluster)[0], signal.SIGKILL)
        for task, prompt in zip(running, prompts, strict=True):
            outputs = await asyncio.wait_for(task, PATIENCE)
            assert tokens(outputs) == [*prompt, EOS]
            assert [output.index for output in outputs] == list(range(len(prompt) + 1))
        assert max(output.epoch for task in running for output in task.result()) == 2
        await until_idle(cluster)
        async with asyncio.timeout(PATIENCE):
            while cluster.restarts < 1:
                await asyncio.sleep(0.005)


async def test_a_choice_that_is_over_is_not_begun_again_by_another_worker() -> None:
    async with workers(2, step_seconds=0.005) as cluster:
        seen: dict[int, list[int]] = {0: [], 1: []}
        async for output in cluster.generate(request(prompt=b"abcdef", n=2, ignore_eos=True, max_tokens=30)):
            seen[output.choice] += output.tokens
            if output.choice == 0 and len(seen[0]) == 4:
                cluster.abort("a", 0, FinishReason.STOP)
                on = next(e.info.pid for e in await cluster.stats(5) if e.stats.running)
                os.kill(on, signal.SIGKILL)
        assert bytes(seen[0]) == b"abcd"
        assert bytes(seen[1]) == b"abcdef" * 5
        await until_idle(cluster)


async def test_a_request_that_ends_every_worker_is_given_up_and_others_are_not_begun_with_it() -> None:
    async with workers(raise_at=3) as cluster:
        with pytest.raises(EngineDied, match="4 workers ended while they had this request"):
            await collect(cluster, request(ignore_eos=True))
        async with asyncio.timeout(PATIENCE):
            while cluster.state is not State.READY:
                await asyncio.sleep(0.005)
        assert tokens(await collect(cluster, request("b", max_tokens=1))) == [97]


async def test_requests_of_a_worker_that_hangs_go_to_the_other() -> None:
    health = HealthPolicy(health_check_interval=0.2, assumed_speed=10_000)
    async with workers(2, health=health, first={"hang_at": 8}, step_seconds=0.002) as cluster:
        running = [asyncio.create_task(collect(cluster, request(str(n), b"abcdefgh" * 4))) for n in range(4)]
        for task in running:
            assert tokens(await asyncio.wait_for(task, PATIENCE)) == [*(b"abcdefgh" * 4), EOS]
        assert max(output.epoch for task in running for output in task.result()) > 1
        assert cluster.restarts == 0, "it was not killed, only left"


async def test_without_a_worker_new_requests_are_refused_and_those_begun_wait() -> None:
    async with workers(policy=RestartPolicy(first_delay=0.5), step_seconds=0.005) as cluster:
        running = asyncio.create_task(collect(cluster, request(prompt=b"abcdefgh" * 4)))
        await asyncio.sleep(0.05)
        os.kill(pids(cluster)[0], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            while cluster.state is not State.DOWN:
                await asyncio.sleep(0.002)
        with pytest.raises(Unavailable, match="being restarted"):
            cluster.require_ready()
        assert tokens(await asyncio.wait_for(running, PATIENCE)) == [*(b"abcdefgh" * 4), EOS]
        cluster.require_ready()


async def test_what_is_not_finished_at_the_end_is_told_why() -> None:
    async with workers(step_seconds=0.005) as cluster:
        running = asyncio.create_task(collect(cluster, request(ignore_eos=True)))
        await asyncio.sleep(0.05)
        await cluster.stop(0.01)
        with pytest.raises(Unavailable, match="shut down before"):
            await running


async def test_work_is_spread_over_workers() -> None:
    async with workers(3, step_seconds=0.005) as cluster:
        running = [asyncio.create_task(collect(cluster, request(str(n), ignore_eos=True, max_tokens=60))) for n in range(9)]
        await asyncio.sleep(0.1)
        assert [engine.stats.running for engine in await cluster.stats(5)] == [3, 3, 3]
        await asyncio.gather(*running)


async def test_a_worker_that_is_being_removed_is_seen_until_it_has_ended_and_may_be_removed_twice() -> None:
    async with workers(2, first={"max_model_len": 10**6}, max_model_len=100, step_seconds=0.005) as cluster:
        running = asyncio.create_task(collect(cluster, request(ignore_eos=True)))  # too long for the other one
        await asyncio.sleep(0.05)
        removing = [asyncio.create_task(cluster.remove("mixed-0")) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert [(name, state) for name, _, state, _ in cluster.overview()] == [("mixed-0", "draining"), ("mixed-1", "healthy")]
        running.cancel()
        await asyncio.wait_for(asyncio.gather(*removing), PATIENCE)
        assert [name for name, *_ in cluster.overview()] == ["mixed-1"]


async def test_nobody_waits_for_workers_that_are_given_up(tmp_path: Path) -> None:
    spent = tmp_path / "spent"
    spent.touch()
    policy = RestartPolicy(first_delay=0.01, load_attempts=1)
    async with workers(2, policy, load_error="the file has changed", once=str(spent), step_seconds=0.05) as cluster:
        running = asyncio.create_task(collect(cluster, request(ignore_eos=True)))
        async with asyncio.timeout(PATIENCE):
            while not sum(engine.stats.running for engine in await cluster.stats(5)):
                pass
        for pid in pids(cluster):
            # The first one that fails to load would have the next one succeed.
            spent.unlink(missing_ok=True)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                while not spent.exists():
                    await asyncio.sleep(0.005)
        assert "the file has changed" in str(await asyncio.wait_for(cluster.failed(), PATIENCE))
        with pytest.raises(Unavailable, match="could not be started again: the file has changed"):
            await asyncio.wait_for(running, PATIENCE)
        with pytest.raises(Unavailable, match="no worker"):
            await asyncio.wait_for(collect(cluster, request("b")), PATIENCE)
        with pytest.raises(Unavailable, match="could not be started again: the file has changed"):
            cluster.require_ready()
