"""Workers in processes of their own that join a gateway over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted_engine
from scripted_engine import EOS

from tokenmill.cluster import dispatcher, joining
from tokenmill.cluster.clusters import Clusters
from tokenmill.cluster.joining import Listening
from tokenmill.cluster.local import Cluster
from tokenmill.cluster.supervisor import RestartPolicy
from tokenmill.core.errors import Unavailable
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import SamplingParams

SECRET = "0123456789abcdef" * 2
PATIENCE = 60.0
SCRIPT = Path(scripted_engine.__file__).with_name("scripted_worker.py")


def listen(port: int = 0) -> Listening:
    return Listening(socket.create_server(("127.0.0.1", port)), SECRET.encode())


@contextlib.asynccontextmanager
async def gateway(port: int = 0, policy: RestartPolicy | None = None) -> AsyncIterator[tuple[Cluster, int]]:
    async with gateway_of("parrot", port=port, policy=policy) as ((cluster,), port):
        yield cluster, port


@contextlib.asynccontextmanager
async def gateway_of(*models: str, port: int = 0, policy: RestartPolicy | None = None) -> AsyncIterator[tuple[list[Cluster], int]]:
    listening = listen(port)
    configs = [msgspec.structs.replace(scripted_engine.config(), served_name=model) for model in models]
    clusters = [Cluster(config, [], joining=True, policy=policy) for config in configs]
    together = Clusters(clusters, listening)
    together.open()
    starting = [asyncio.create_task(cluster.start()) for cluster in clusters]
    try:
        yield clusters, listening.sock.getsockname()[1]
    finally:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await together.stop(0)


class Joined:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)).decode()

    async def ends(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE)

    async def said(self) -> str:
        """On standard error, once it has ended."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@contextlib.asynccontextmanager
async def worker(port: int, **setup: Any) -> AsyncIterator[Joined]:
    told = msgspec.json.encode({"port": port, "secret": SECRET} | setup).decode()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(SCRIPT), told, stdout=pipe, stderr=pipe)
    try:
        yield Joined(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def request(name: str, prompt: bytes, **params: Any) -> Generate:
    return Generate(request_id=name, prompt=list(prompt), eos_ids=(EOS,), params=SamplingParams(max_tokens=1000, **params))


async def ask(cluster: Cluster, one: Generate) -> list[int]:
    async def collect() -> list[SequenceOutput]:
        return [output async for output in cluster.generate(one)]

    return [token for output in await asyncio.wait_for(collect(), PATIENCE) for token in output.tokens]


async def until_there(cluster: Cluster, *names: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while set(cluster.workers) != set(names):
            await asyncio.sleep(0.005)


async def test_a_gateway_without_workers_of_its_own_serves_by_one_that_joins() -> None:
    async with gateway() as (cluster, port), worker(port) as one:
        assert (await one.line()).startswith("joined")
        await until_there(cluster, "w")
        assert await ask(cluster, request("a", b"abc")) == [*b"abc", EOS]


async def test_streams_of_a_killed_worker_go_on_elsewhere() -> None:
    script = {"step_seconds": 0.005}
    async with gateway() as (cluster, port), worker(port, name="v", script=script) as v, worker(port, name="w", script=script):
        await until_there(cluster, "v", "w")
        prompts = [bytes(range(65 + n, 91)) for n in range(6)]
        running = [asyncio.create_task(ask(cluster, request(str(n), prompt))) for n, prompt in enumerate(prompts)]
        await asyncio.sleep(0.04)
        v.process.kill()
        assert [await task for task in running] == [[*prompt, EOS] for prompt in prompts]
        await until_there(cluster, "w")


async def test_no_stream_goes_on_at_a_worker_whose_answers_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is let in, as nobody is there any more with whom it would not agree."""
    monkeypatch.setattr(dispatcher, "HOLD", 3.0)
    async with gateway() as (cluster, port), worker(port, name="v", script={"step_seconds": 0.005}) as v:
        await until_there(cluster, "v")
        begun = asyncio.create_task(ask(cluster, request("a", b"abc", ignore_eos=True)))
        async with asyncio.timeout(PATIENCE):
            while not (await cluster.stats(5))[0].stats.running:
                await asyncio.sleep(0.005)
        v.process.kill()
        await until_there(cluster)
        async with worker(port, name="w", script={"fingerprint": "e" * 32}):
            await until_there(cluster, "w")
            with pytest.raises(Unavailable, match="of another fingerprint"):
                await begun
            assert await ask(cluster, request("b", b"abc")) == [*b"abc", EOS]
            assert [engine.name for engine in await cluster.stats(5)] == ["w"], "who has left is not told of for ever"


async def test_a_worker_that_hangs_for_long_is_cut_off_and_comes_back_when_it_goes_on() -> None:
    """The system on its host answers for it, so that the connection never ends by itself."""
    async with gateway(policy=RestartPolicy(ask_every=0.1, killed_after=3.0)) as (cluster, port), worker(port) as one:
        first = await one.line()
        await until_there(cluster, "w")
        one.process.send_signal(signal.SIGSTOP)
        await until_there(cluster)
        one.process.send_signal(signal.SIGCONT)
        assert await one.line() == first, "the same process"
        await until_there(cluster, "w")
        assert await ask(cluster, request("a", b"abc")) == [*b"abc", EOS]


async def test_a_worker_ends_what_it_had_and_comes_back_to_a_gateway_that_was_restarted() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with gateway() as (cluster, port):
            one = await stack.enter_async_context(worker(port, script={"step_seconds": 0.1}))  # longer than anybody waits
            first = await one.line()
            await until_there(cluster, "w")
            left = asyncio.create_task(ask(cluster, request("a", b"abc", ignore_eos=True)))
            async with asyncio.timeout(PATIENCE):
                while not (await cluster.stats(5))[0].stats.running:
                    await asyncio.sleep(0.005)
            cluster._dispatcher.member("w").client.cut()  # type: ignore[union-attr]
            assert await one.line() == first, "the same process, and so the same boot"
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        async with gateway(port) as (cluster, _):
            assert await one.line() == first
            await until_there(cluster, "w")
            assert (await cluster.stats(5))[0].stats.kv_held == 0
            assert await ask(cluster, request("a", b"xyz")) == [*b"xyz", EOS]


@pytest.mark.parametrize(
    ("setup", "why"),
    [({"secret": "f" * 32}, "does not know the gateway's secret"), ({"model": "crow"}, "has model 'crow', but 'parrot' is served")],
    ids=["secret", "model"],
)
async def test_who_is_not_wanted_is_told_why_and_ends(setup: dict[str, Any], why: str) -> None:
    async with gateway() as (_, port), worker(port, **setup) as one:
        assert await one.ends() == 1
        assert why in await one.said()


async def test_workers_of_several_models_join_one_gateway_and_others_do_not() -> None:
    async with gateway_of("parrot", "crow") as ((parrot, crow), port), worker(port, name="p") as p:
        await until_there(parrot, "p")
        with pytest.raises(Unavailable, match="no worker has joined yet"):
            crow.require_ready()
        assert await ask(parrot, request("a", b"abc")) == [*b"abc", EOS]
        async with worker(port, name="p", model="crow") as clash:
            assert clash.process.stderr is not None
            told = (await asyncio.wait_for(clash.process.stderr.readline(), PATIENCE)).decode()
            assert "a worker of model 'parrot' is called p: give this one another --name" in told
        async with worker(port, name="c", model="crow") as c, worker(port, name="m", model="magpie") as magpie:
            await until_there(crow, "c")
            await until_there(parrot, "p")
            assert await ask(crow, request("b", b"xyz")) == [*b"xyz", EOS]
            assert await magpie.ends() == 1
            said = await magpie.said()
            assert "has model 'magpie', but 'parrot' and 'crow' are served here" in said
            assert "--served-model-name parrot or crow" in said
            p.process.kill()
            await until_there(parrot)
            assert await ask(crow, request("c", b"xyz")) == [*b"xyz", EOS]
            c.process.send_signal(signal.SIGTERM)
            assert await c.ends() == 0


async def test_the_name_of_a_living_worker_is_not_given_to_another() -> None:
    async with gateway() as (cluster, port), worker(port) as first:
        await first.line()
        await until_there(cluster, "w")
        async with worker(port) as second:
            assert second.process.stderr is not None
            told = (await asyncio.wait_for(second.process.stderr.readline(), PATIENCE)).decode()
            assert "a living worker is called w" in told
            first.process.kill()
            assert (await second.line()).startswith("joined")


async def test_a_worker_that_is_asked_to_end_finishes_what_it_has() -> None:
    async with gateway() as (cluster, port), worker(port, script={"step_seconds": 0.005}) as one:
        await until_there(cluster, "w")
        running = asyncio.create_task(ask(cluster, request("a", b"abcdefgh" * 4)))
        await asyncio.sleep(0.05)
        one.process.send_signal(signal.SIGTERM)
        assert await running == [*(b"abcdefgh" * 4), EOS]
        assert await one.ends() == 0
        assert "the time to finish is over" not in await one.said()


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 2**31), struct.pack(">I", 3) + b"\xc1\xc1\xc1", struct.pack(">I", 2**14) + b"x"],
    ids=["http", "long", "garbage", "half"],
)
async def test_strangers_do_not_keep_workers_out(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MAX_STRANGERS", 4)
    async with gateway() as (cluster, port), contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(12):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.push_async_callback(writer.wait_closed)
            stack.callback(writer.close)
            readers.append(reader)
            writer.write(said)
        with contextlib.suppress(ConnectionError):  # the oldest is given up for the others, long before its time is over
            await asyncio.wait_for(readers[0].read(), joining.OPENING_SECONDS / 2)
        async with worker(port) as one:
            assert (await one.line()).startswith("joined")
            await until_there(cluster, "w")
            assert await ask(cluster, request("a", b"abc")) == [*b"abc", EOS]


async def test_who_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "OPENING_SECONDS", 0.1)
    async with gateway() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
