"""An engine process and its client, without a model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import hearing
import nurseries
import pytest
import scripted_engine
from scripted_engine import EOS

from tokenmill.cluster.process import WorkerProcess
from tokenmill.core.errors import EngineDied, KVBudgetTooSmall, ModelFileError
from tokenmill.core.messages import Generate, SequenceOutput, Stats
from tokenmill.core.types import FinishReason, SamplingParams


@contextlib.asynccontextmanager
async def worker(**script: object) -> AsyncIterator[WorkerProcess]:
    async with nurseries.scripted(**script) as ward:
        process, _ = await ward.loaded()
        yield process


def request(request_id: str = "a", prompt: bytes = b"abc", **params: object) -> Generate:
    return Generate(request_id=request_id, prompt=list(prompt), eos_ids=(EOS,), params=SamplingParams(**params))  # type: ignore[arg-type]


async def collect(process: WorkerProcess, *requests: Generate) -> list[SequenceOutput]:
    return await hearing.collect(process.client, *requests)


async def until_idle(process: WorkerProcess) -> Stats:
    """Counters once nothing is held. Steps of the engine order this: an abort is handled before the next question."""
    while (stats := await process.client.stats()).kv_held:
        pass
    return stats


async def test_a_request_gets_its_tokens_and_exactly_one_last_output() -> None:
    async with worker() as process:
        outputs = await collect(process, request())
        assert [t for o in outputs for t in o.tokens] == [*b"abc", EOS]
        assert [o.finish_reason for o in outputs] == [None, None, None, FinishReason.STOP]
        assert (await until_idle(process)).generation_tokens == 4


async def test_a_refused_request_is_answered_with_the_engines_error() -> None:
    async with worker(refuse="needs 9 frames of 8") as process:
        with pytest.raises(KVBudgetTooSmall, match="needs 9 frames of 8") as caught:
            await collect(process, request())
        assert caught.value.param == "max_tokens"


async def test_the_end_of_a_killed_process_is_told_and_questions_fail() -> None:
    async with worker(step_seconds=0.001) as process:
        running = asyncio.create_task(collect(process, *(request(name, ignore_eos=True) for name in "abc")))
        await process.client.stats()
        asked = asyncio.create_task(process.client.stats())
        process.kill()
        with pytest.raises(EngineDied):
            await running
        with contextlib.suppress(EngineDied):  # unless it has just been answered
            await asked
        await process.client.wait_ended()
        with pytest.raises(EngineDied):
            await process.client.stats()


async def test_who_listens_to_a_stream_that_has_ended_is_told_so_at_once() -> None:
    async with worker() as process:
        process.kill()
        await process.client.wait_ended()
        with pytest.raises(EngineDied):
            await collect(process, request())


async def test_an_exception_in_a_step_ends_the_process_with_a_logged_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    async with worker(raise_at=2) as process:
        with pytest.raises(EngineDied):
            await collect(process, request())
        assert await process.wait() == 1
    assert "ZeroDivisionError: the script says so" in capfd.readouterr().err


async def test_a_drained_process_finishes_its_work_and_ends_with_status_0() -> None:
    async with worker() as process:
        running = asyncio.create_task(collect(process, request(ignore_eos=True, max_tokens=200)))
        await process.client.stats()
        process.client.drain()
        assert len(await running) == 200
        assert await process.wait() == 0


async def test_signals_meant_for_the_whole_group_do_not_end_the_processes() -> None:
    async with nurseries.scripted() as ward:
        process, info = await ward.loaded()
        for pid in (info.pid, nurseries.parent_of(info.pid)):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert len(await collect(process, request())) == 4
        again, _ = await ward.loaded()
        assert len(await collect(again, request())) == 4


async def test_a_load_error_arrives_as_itself_and_the_process_ends() -> None:
    async with nurseries.scripted(load_error="truncated at byte 7") as ward:
        process = await ward.spawn()
        with pytest.raises(ModelFileError, match="truncated at byte 7"):
            await process.load(ward.config)
        assert await process.wait() == 1


async def test_a_process_that_ends_while_loading_is_told_with_its_status() -> None:
    async with nurseries.scripted(load_exit=3) as ward:
        process = await ward.spawn()
        with pytest.raises(EngineDied, match="ended with status 3 while it was loading"):
            await process.load(ward.config)


ORPHAN = """
import asyncio, sys
sys.path.insert(0, {here!r})
import scripted_engine
from tokenmill.cluster.nursery import Nursery
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams

async def main():
    config = scripted_engine.config(hang_at={hang_at})
    process = await Nursery(config, scripted_engine.command()).spawn()
    info = await process.load(config)
    print(info.pid, flush=True)
    process.client.send(Generate(request_id="a", prompt=[1], params=SamplingParams(ignore_eos=True)))
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("hang_at", [3, None], ids=["in a step that never ends", "between steps"])
def test_no_process_outlives_a_parent_that_is_killed(hang_at: int | None) -> None:
    source = textwrap.dedent(ORPHAN.format(here=str(Path(scripted_engine.__file__).parent), hang_at=hang_at))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        os.set_blocking(descriptor, True)
        wait_for_exit(descriptor, seconds=10)
    finally:
        os.close(descriptor)


def wait_for_exit(pidfd: int, seconds: float) -> None:
    import select

    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(seconds * 1000), "the process is still there"
