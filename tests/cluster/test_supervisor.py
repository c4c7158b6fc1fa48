"""The supervisor over engine processes without a model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import hearing
import nurseries
import pytest
import scripted_engine
import serving
from nurseries import gone

from tokenmill.cluster.supervisor import RestartPolicy, State, Supervisor
from tokenmill.core.errors import EngineDied, ModelFileError, Unavailable
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import SamplingParams

QUICK = RestartPolicy(first_delay=0.01, longest_delay=0.02, load_attempts=3)


@contextlib.asynccontextmanager
async def supervisor(policy: RestartPolicy = QUICK, **script: object) -> AsyncIterator[Supervisor]:
    async with nurseries.scripted(**script) as ward:
        one = Supervisor(ward.config, ward.nursery.spawn, policy=policy)
        try:
            yield one
        finally:
            await one.stop(0)


@contextlib.asynccontextmanager
async def started(policy: RestartPolicy = QUICK, **script: object) -> AsyncIterator[Supervisor]:
    async with supervisor(policy, **script) as one:
        await one.start()
        yield one


async def ask(one: Supervisor, **params: object) -> list[SequenceOutput]:
    request = Generate(request_id=os.urandom(4).hex(), prompt=[65, 66], eos_ids=(scripted_engine.EOS,), params=SamplingParams(**params))  # type: ignore[arg-type]
    return await hearing.collect(one.client, request)


async def until_ready(one: Supervisor, restarts: int) -> None:
    async with asyncio.timeout(20):
        while one.restarts < restarts or one.state is not State.READY:
            await asyncio.sleep(0.005)


async def test_ready_after_the_load_and_no_process_left_after_stop() -> None:
    async with supervisor() as one:
        assert one.state is State.LOADING
        with pytest.raises(Unavailable, match="loading"):
            _ = one.client
        info = await one.start()
        assert (one.state, one.advancing) == (State.READY, True)
        assert len(await ask(one)) == 3
        await one.stop(5)
        assert gone(info.pid)
        with pytest.raises(Unavailable, match="shutting down"):
            _ = one.client


@pytest.mark.parametrize("what", ["weights_error", "load_error"])
async def test_the_first_load_that_fails_is_told_and_not_tried_again(what: str, tmp_path: Path) -> None:
    async with supervisor(**{what: "bad magic"}, once=str(tmp_path / "spent")) as one:
        with pytest.raises(ModelFileError, match="bad magic"):
            await one.start()


async def test_a_killed_engine_is_seen_at_once_and_replaced() -> None:
    async with started() as one:
        first = one.info.pid
        os.kill(first, signal.SIGKILL)
        await one.client.wait_ended()
        await until_ready(one, restarts=1)
        assert one.info.pid != first
        assert len(await ask(one)) == 3


async def test_between_two_engines_requests_are_refused(tmp_path: Path) -> None:
    async with started(RestartPolicy(first_delay=60)) as one:
        client = one.client
        os.kill(one.info.pid, signal.SIGKILL)
        await client.wait_ended()
        await asyncio.sleep(0)
        assert (one.state, one.advancing) == (State.DOWN, False)
        with pytest.raises(Unavailable, match="being restarted"):
            _ = one.client


async def test_the_log_says_what_killed_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as one:
        for restarts in range(1, 6):
            os.kill(one.info.pid, signal.SIGKILL)
            await until_ready(one, restarts=restarts)
    assert [r.message for r in caplog.records if "process" in r.message] == ["the process of engine was ended by signal 9 (Killed)"] * 5


async def test_an_engine_that_hangs_is_killed_its_requests_fail_and_the_next_one_serves(tmp_path: Path) -> None:
    policy = RestartPolicy(first_delay=0.01, ask_every=0.05, stalled_after=0.2, killed_after=0.3)
    async with started(policy, hang_at=2, once=str(tmp_path / "spent")) as one:
        with pytest.raises(EngineDied):
            await ask(one)
        await until_ready(one, restarts=1)
        assert len(await ask(one)) == 3


async def test_an_engine_that_hangs_before_it_is_ready_is_killed_and_tried_again(tmp_path: Path) -> None:
    spent = tmp_path / "spent"
    spent.touch()
    policy = RestartPolicy(first_delay=0.01, killed_after=1.0)
    async with started(policy, load_hangs=True, once=str(spent)) as one:
        spent.unlink()
        os.kill(one.info.pid, signal.SIGKILL)
        await until_ready(one, restarts=1)
        assert len(await ask(one)) == 3


async def test_an_idle_engine_is_not_taken_for_a_hung_one() -> None:
    policy = RestartPolicy(first_delay=0.01, ask_every=0.05, stalled_after=0.2, killed_after=0.3)
    async with started(policy) as one:
        await asyncio.sleep(0.6)
        assert (one.restarts, one.state, one.advancing) == (0, State.READY, True)
        assert one.last_stats is not None


async def test_a_restart_is_given_up_after_so_many_failed_loads(tmp_path: Path) -> None:
    """The second process finds a damaged file, for ever."""
    spent = tmp_path / "spent"
    spent.touch()
    async with started(load_error="damaged", once=str(spent)) as one:
        spent.unlink()
        attempts = 0

        async def damage_again() -> None:
            nonlocal attempts
            while True:
                await asyncio.sleep(0.001)
                if spent.exists():
                    attempts += 1
                    spent.unlink()

        damaging = asyncio.create_task(damage_again())
        os.kill(one.info.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            while (error := one.failure) is None:
                await asyncio.sleep(0.01)
        damaging.cancel()
        assert isinstance(error, ModelFileError)
        assert attempts >= QUICK.load_attempts - 1
        assert one.state is State.DOWN


async def test_a_drain_lets_the_work_in_flight_finish() -> None:
    async with started(step_seconds=0.001) as one:
        running = asyncio.create_task(ask(one, ignore_eos=True, max_tokens=100))
        await one.client.stats()
        await one.stop(20)
        assert len(await running) == 100


async def test_an_engine_that_dies_while_it_is_drained_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as one:
        one.begin_drain()
        os.kill(one.info.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while "was ended by signal 9" not in caplog.text:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)  # far longer than the delay before a start
        assert (one.restarts, "is started again" in caplog.text) == (0, False)
        await one.stop(5)


async def test_work_that_outlasts_the_drain_ends_with_its_process() -> None:
    async with started(step_seconds=0.01) as one:
        pid = one.info.pid
        running = asyncio.create_task(ask(one, ignore_eos=True))
        await one.client.stats()
        await one.stop(0.05)
        with pytest.raises(EngineDied):
            await running
        assert gone(pid)


@pytest.mark.parametrize(("what", "processes"), [("weights_seconds", 1), ("load_seconds", 2)])
async def test_a_load_that_is_cancelled_leaves_no_process(what: str, processes: int) -> None:
    async with supervisor(**{what: 60}) as one:
        loading = asyncio.create_task(one.start())
        while len(serving.descendants(os.getpid())) < processes:
            await asyncio.sleep(0.005)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await one.stop(0)
    assert serving.child_pids(os.getpid()) == []


async def test_several_share_a_nursery_and_one_load() -> None:
    async with nurseries.scripted() as ward:
        several = [Supervisor(ward.config, ward.nursery.spawn, policy=QUICK) for _ in range(3)]
        infos = await asyncio.gather(*(one.start() for one in several))
        assert len({info.pid for info in infos}) == 3
        assert len({nurseries.parent_of(info.pid) for info in infos}) == 1
        os.kill(infos[1].pid, signal.SIGKILL)
        await until_ready(several[1], restarts=1)
        assert [len(await ask(one)) for one in several] == [3, 3, 3]
        assert [one.restarts for one in several] == [0, 1, 0]
        for one in several:
            await one.stop(0)


def test_delays_double_up_to_the_longest() -> None:
    policy = RestartPolicy(first_delay=0.25, longest_delay=30)
    assert [policy.delay(n) for n in (1, 2, 3, 8, 1000)] == [0.25, 0.5, 1.0, 30, 30]


def test_longer_steps_may_be_silent_for_longer() -> None:
    policies = [RestartPolicy(stalled_after=60, killed_after=600).for_chunks_of(chunk) for chunk in (16, 512, 2048)]
    assert [(policy.stalled_after, policy.killed_after) for policy in policies] == [(60, 600), (60, 600), (240, 2400)]
