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
    return [output async for output in process.client.generate(*requests)]


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


async def test_several_requests_with_several_choices_end_when_the_last_choice_has() -> None:
    async with worker() as process:
        outputs = await collect(process, request("a", b"xy", n=2), request("b", b"pqrst"))
        ends = [(o.request_id, o.choice) for o in outputs if o.finish_reason]
        assert sorted(ends) == [("a", 0), ("a", 1), ("b", 0)]


async def test_a_refused_request_raises_the_engines_error() -> None:
    async with worker(refuse="needs 9 frames of 8") as process:
        with pytest.raises(KVBudgetTooSmall, match="needs 9 frames of 8") as caught:
            await collect(process, request())
        assert caught.value.param == "max_tokens"


async def test_leaving_the_iteration_frees_the_request() -> None:
    async with worker() as process:
        async with contextlib.aclosing(process.client.generate(request(ignore_eos=True))) as outputs:
            await anext(outputs)
            assert (await process.client.stats()).kv_held > 0
        await until_idle(process)


async def test_a_cancelled_consumer_frees_the_request() -> None:
    async with worker() as process:
        begun = asyncio.Event()

        async def consume() -> None:
            async for _ in process.client.generate(request(ignore_eos=True)):
                begun.set()

        task = asyncio.create_task(consume())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_idle(process)


async def test_an_aborted_choice_yields_nothing_more_and_the_other_goes_on() -> None:
    async with worker() as process:
        seen: dict[int, int] = {0: 0, 1: 0}
        async for output in process.client.generate(request(n=2, ignore_eos=True, max_tokens=50)):
            seen[output.choice] += len(output.tokens)
            if output.choice == 0 and seen[0] == 3:
                process.client.abort("a", 0, FinishReason.STOP)
        assert seen == {0: 3, 1: 50}


async def test_aborting_from_elsewhere_ends_the_iteration() -> None:
    async with worker(step_seconds=0.001) as process:
        count = 0

        async def consume() -> None:
            nonlocal count
            async for _ in process.client.generate(request(ignore_eos=True)):
                count += 1
                begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(consume())
        await begun.wait()
        process.client.abort("a")
        await asyncio.wait_for(task, 5)
        await until_idle(process)


async def test_a_killed_process_fails_every_request_and_question_in_flight() -> None:
    async with worker(step_seconds=0.001) as process:
        running = [asyncio.create_task(collect(process, request(name, ignore_eos=True))) for name in "abc"]
        await process.client.stats()
        process.kill()
        for result in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(result, EngineDied)
        await process.client.wait_ended()
        with pytest.raises(EngineDied):
            await collect(process, request("d"))
        with pytest.raises(EngineDied):
            await process.client.stats()


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
    async for _ in process.client.generate(Generate(request_id="a", prompt=[1], params=SamplingParams(ignore_eos=True))):
        pass

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
