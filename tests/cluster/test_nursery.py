"""The process that forks engine processes, over engines without a model."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import hearing
import nurseries
import pytest
import scripted_engine
import serving
from nurseries import descriptors_of, gone, parent_of

from tokenmill.cluster import nursery as cluster_nursery
from tokenmill.cluster.nursery import Nursery
from tokenmill.cluster.process import WorkerProcess, describe_exit
from tokenmill.core.errors import EngineDied, ModelFileError, Unavailable
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import SamplingParams


async def ask(worker: WorkerProcess, **params: object) -> list[SequenceOutput]:
    request = Generate(request_id=os.urandom(4).hex(), prompt=[65, 66], eos_ids=(scripted_engine.EOS,), params=SamplingParams(**params))  # type: ignore[arg-type]
    return await hearing.collect(worker.client, request)


async def test_workers_that_are_asked_for_at_a_time_come_from_one_process_that_loads_once() -> None:
    async with nurseries.scripted(weights_seconds=0.1) as ward:
        workers = await asyncio.gather(*(ward.loaded() for _ in range(4)))
        assert len({info.pid for _, info in workers}) == 4
        (nursery,) = serving.child_pids(os.getpid())
        assert {parent_of(info.pid) for _, info in workers} == {nursery}
        assert [len(await ask(worker)) for worker, _ in workers] == [3] * 4


async def test_when_one_is_killed_the_others_go_on_and_the_next_is_there() -> None:
    async with nurseries.scripted(step_seconds=0.001) as ward:
        (one, info), (other, _) = await ward.loaded(), await ward.loaded()
        running = asyncio.create_task(ask(other, ignore_eos=True, max_tokens=300))
        await other.client.stats()
        os.kill(info.pid, signal.SIGKILL)
        await one.client.wait_ended()
        assert await one.wait() == -signal.SIGKILL
        third, its = await ward.loaded()
        assert its.pid != info.pid
        assert len(await ask(third)) == 3
        assert len(await running) == 300


async def test_what_has_ended_is_waited_for_and_leaves_no_zombie() -> None:
    async with nurseries.scripted() as ward:
        workers = [await ward.loaded() for _ in range(3)]
        (nursery,) = serving.child_pids(os.getpid())
        workers[0][0].kill()
        workers[1][0].client.drain()
        os.kill(workers[2][1].pid, signal.SIGKILL)
        assert [await worker.wait() for worker, _ in workers] == [-9, 0, -9]
        assert [await worker.wait() for worker, _ in workers] == [-9, 0, -9], "it can be asked again"
        assert serving.child_pids(nursery) == []
        for worker, _ in workers:
            worker.kill()  # is of no consequence


async def test_no_descriptor_of_a_process_is_open_in_another() -> None:
    """Nor is one that the server itself has inherited, and so hands on to what it starts."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    async with nurseries.scripted() as ward:
        infos = [info for _, info in [await ward.loaded() for _ in range(3)]]
        os.close(writing)
        with open(reading, "rb") as stream:
            assert stream.read() == b""
        (nursery,) = serving.child_pids(os.getpid())
        own = [descriptors_of(info.pid) for info in infos]
        for found in own:
            beyond = {number: what for number, what in found.items() if number > 2}
            assert [what.partition(":")[0] for what in beyond.values()] == ["socket"], found
        streams = [what for found in own for number, what in found.items() if number > 2]
        assert len(set(streams)) == 3
        held = descriptors_of(nursery)
        assert not set(held.values()) & set(streams)
        assert sum(what.startswith("socket") for number, what in held.items() if number > 2) == 1, "the control socket"
        assert {os.getsid(info.pid) for info in infos} == {info.pid for info in infos}, "each is in a session of its own"


async def test_a_workers_end_is_seen_although_it_has_younger_siblings() -> None:
    """None of them keeps its end of the stream open."""
    async with nurseries.scripted() as ward:
        workers = [await ward.loaded() for _ in range(3)]
        for worker, info in workers:
            os.kill(info.pid, signal.SIGKILL)
            await asyncio.wait_for(worker.client.wait_ended(), 60)


async def test_workers_outlive_their_nursery_and_the_next_one_is_of_a_new_one() -> None:
    async with nurseries.scripted(step_seconds=0.001) as ward:
        worker, info = await ward.loaded()
        (nursery,) = serving.child_pids(os.getpid())
        running = asyncio.create_task(ask(worker, ignore_eos=True, max_tokens=100))
        await worker.client.stats()
        os.kill(nursery, signal.SIGKILL)
        assert len(await running) == 100
        next_, its = await ward.loaded()
        (new,) = serving.child_pids(os.getpid())
        assert (parent_of(its.pid), new != nursery) == (new, True)
        assert len(await ask(worker)) == len(await ask(next_)) == 3
        os.kill(info.pid, signal.SIGKILL)
        status = await worker.wait()
        assert status is None
        assert "nobody knows how" in describe_exit(status)
        next_.kill()
        assert await next_.wait() == -signal.SIGKILL


async def test_a_gateway_that_inherits_orphans_learns_how_they_end_and_leaves_no_zombie() -> None:
    """As process 1 of a container does, and one that has asked for it."""
    prctl, subreaper = ctypes.CDLL(None).prctl, 36
    assert prctl(subreaper, 1) == 0
    try:
        async with nurseries.scripted() as ward:
            worker, info = await ward.loaded()
            (nursery,) = serving.child_pids(os.getpid())
            os.kill(nursery, signal.SIGKILL)
            while parent_of(info.pid) != os.getpid():
                await asyncio.sleep(0.005)
            worker.client.drain()
            assert await worker.wait() == 0
            assert gone(info.pid)
    finally:
        prctl(subreaper, 0)


async def test_orphans_of_a_nursery_can_be_killed_and_waited_for() -> None:
    async with nurseries.scripted(hang_at=1) as ward:
        worker, info = await ward.loaded()
        await ward.nursery.close()
        assert not gone(info.pid)
        worker.kill()
        await worker.wait()
        serving.until(lambda: gone(info.pid))


async def test_a_fork_that_is_under_way_when_the_nursery_dies_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with nurseries.scripted() as ward:
        await ward.spawn()
        (nursery,) = serving.child_pids(os.getpid())
        os.kill(nursery, signal.SIGSTOP)
        asking = asyncio.create_task(ward.nursery.spawn())
        await asyncio.sleep(0)
        os.kill(nursery, signal.SIGKILL)
        with pytest.raises(EngineDied, match="before it could fork"):
            await asking
        await ward.loaded()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == [], "a reset is an end like another"


async def test_a_nursery_that_hangs_is_replaced_by_one_that_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nurseries.scripted() as ward:
        worker, _ = await ward.loaded()
        (nursery,) = serving.child_pids(os.getpid())
        os.kill(nursery, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(cluster_nursery, "FORK_WITHIN", 0.2)
            with pytest.raises(Unavailable, match="hangs: it gave no engine process"):
                await ward.nursery.spawn()
        while not gone(nursery):
            await asyncio.sleep(0.005)
        next_, _ = await ward.loaded()
        assert len(await ask(worker)) == len(await ask(next_)) == 3


async def test_a_load_that_fails_tells_its_error_to_all_who_wait_and_the_next_call_tries_again(tmp_path: Path) -> None:
    async with nurseries.scripted(weights_error="bad magic", once=str(tmp_path / "spent")) as ward:
        for error in await asyncio.gather(ward.spawn(), ward.spawn(), return_exceptions=True):
            assert isinstance(error, ModelFileError)
            assert error.message == "bad magic"
        assert serving.child_pids(os.getpid()) == []
        await ward.loaded()


async def test_a_process_that_ends_while_it_loads_the_model_is_told_with_its_status() -> None:
    async with nurseries.scripted(weights_exit=3) as ward:
        with pytest.raises(EngineDied, match="ended with status 3 while it was loading"):
            await ward.spawn()


async def test_one_caller_that_gives_up_does_not_end_the_load_of_another() -> None:
    async with nurseries.scripted(weights_seconds=0.2) as ward:
        one, other = asyncio.create_task(ward.nursery.spawn()), asyncio.create_task(ward.loaded())
        while not serving.child_pids(os.getpid()):
            await asyncio.sleep(0.001)
        one.cancel()
        worker, _ = await other
        assert len(await ask(worker)) == 3


@pytest.mark.parametrize("turns", range(6))
async def test_a_close_waits_for_forks_whose_callers_gave_up(turns: int) -> None:
    """At whatever point they did. An unclosed descriptor would be a warning, and so an error."""
    async with nurseries.scripted() as ward:
        await ward.loaded()
        asking = asyncio.create_task(ward.nursery.spawn())
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns % 2:
            time.sleep(0.02)  # the loop stands still: if a fork was asked for, its answer is there and not read
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert serving.child_pids(os.getpid()) == []


async def test_a_fork_that_nobody_waits_for_leaves_no_process() -> None:
    async with nurseries.scripted() as ward:
        _, kept = await ward.loaded()
        (nursery,) = serving.child_pids(os.getpid())
        open_here = len(descriptors_of(os.getpid()))
        for _ in range(5):
            asking = asyncio.create_task(ward.nursery.spawn())
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        worker, info = await ward.loaded()
        while set(serving.child_pids(nursery)) != {kept.pid, info.pid}:
            await asyncio.sleep(0.005)
        worker.kill()
        await worker.wait()
        assert len(descriptors_of(os.getpid())) == open_here


async def test_a_nursery_that_may_open_nothing_more_says_so_and_goes_on_later() -> None:
    async with nurseries.scripted() as ward:
        worker, _ = await ward.loaded()
        (nursery,) = serving.child_pids(os.getpid())
        limits = resource.prlimit(nursery, resource.RLIMIT_NOFILE)
        free = next(number for number in range(100) if number not in descriptors_of(nursery))
        resource.prlimit(nursery, resource.RLIMIT_NOFILE, (free, limits[1]))
        with pytest.raises(Unavailable, match="could not fork"):
            await ward.spawn()
        resource.prlimit(nursery, resource.RLIMIT_NOFILE, limits)
        again, info = await ward.loaded()
        assert parent_of(info.pid) == nursery
        assert len(await ask(worker)) == len(await ask(again)) == 3


async def test_a_close_leaves_no_process_be_it_loading() -> None:
    for seconds in (0.0, 600.0):
        config = scripted_engine.config(weights_seconds=seconds)
        nursery = Nursery(config, scripted_engine.command())
        asking = asyncio.create_task(nursery.spawn())
        if seconds:
            while not serving.child_pids(os.getpid()):
                await asyncio.sleep(0.001)
        else:
            worker = await asking
            worker.kill()
            await worker.wait()
        await nursery.close()
        await asyncio.gather(asking, return_exceptions=True)
        assert serving.child_pids(os.getpid()) == []


GATEWAY = """
import asyncio, sys
sys.path.insert(0, {here!r})
import scripted_engine
from tokenmill.cluster import nursery as cluster_nursery
from tokenmill.cluster.nursery import Nursery
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams

async def main():
    config = scripted_engine.config({script})
    nursery = Nursery(config, scripted_engine.command())
    asking = asyncio.create_task(nursery.spawn())
    workers = [await asking, await nursery.spawn(), await nursery.spawn()]
    for worker in workers[:2]:
        await worker.load(config)
    workers[0].client.send(Generate(request_id="a", prompt=[1], params=SamplingParams(ignore_eos=True)))
    await asyncio.sleep(0.01)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("loading", [True, False])
def test_nothing_is_left_of_a_gateway_that_is_killed(loading: bool) -> None:
    """Not what loads, not what is in a step that never ends, not what is idle, nor what has no engine yet."""
    script = "weights_seconds=600.0" if loading else "hang_at=1"
    source = textwrap.dedent(GATEWAY.format(here=str(Path(scripted_engine.__file__).parent), script=script))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as gateway:
        assert gateway.stdout is not None
        assert gateway.stdout.readline() in ("loading weights\n", "ready\n")
        serving.until(lambda: len(serving.descendants(gateway.pid)) == (1 if loading else 4), 60)
        handles = [os.pidfd_open(pid) for pid in serving.descendants(gateway.pid)]
        gateway.kill()
    try:
        for handle in handles:
            events = select.poll()
            events.register(handle, select.POLLIN)
            assert events.poll(60_000), "a process is still there"
    finally:
        for handle in handles:
            os.close(handle)
