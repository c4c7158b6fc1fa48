"""The process around the application: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from tokenmill.core.errors import ConfigError
from tokenmill.gateway.app import build_app
from tokenmill.gateway.protocol import JSONProtocol
from tokenmill.gateway.served_model import ServedModel
from tokenmill.gateway.service import Service

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than the pools of common clients keep theirs."""

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that computes hands the interpreter to one that waits. An answer needs it several times,
so that with Python's default of 5 ms a long prompt being tokenised would make every other client wait for tens."""

LAST_ANSWERS = 2
"""Seconds for clients to take what is left, once nothing more is computed."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything expensive happens. Raises `ConfigError` if the address cannot be had."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(*address[:3])
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}", param="host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address[4])
        sock.listen(2048)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error}: choose another --port or --host", param="port") from None
    return sock


class _Server(uvicorn.Server):
    """Uvicorn, with its signals handed on."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal(sig)


async def serve(service: Service, sock: socket.socket, shutdown_timeout: float, announce: Callable[[ServedModel], None]) -> None:
    """Serve until SIGINT or SIGTERM, then finish what is in flight within `shutdown_timeout` seconds.

    A second signal ends everything at once. Probes are answered while models load; `announce` is called for each that is
    ready. Raises the error that made a first load fail, or that ended the attempts to start the engine again.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    _interrupt_nobody()
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            service.clusters.kill()
            os._exit(128 + number)
        loop.call_soon_threadsafe(stopping.set)

    config = uvicorn.Config(
        build_app(service),
        http=JSONProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=LAST_ANSWERS,
    )
    server = _Server(config, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    working = asyncio.create_task(_work(service, announce))
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({serving, working, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await _drain(service, working, shutdown_timeout)
    finally:
        stop.cancel()
        working.cancel()
        failure = (await asyncio.gather(working, return_exceptions=True))[0]
        await service.clusters.stop(0)
        service.close()
        server.should_exit = True
        await serving
    if isinstance(failure, Exception):
        raise failure


def _interrupt_nobody() -> None:
    """Have this thread wait for a CPU until one is given away or a time slice ends, a few milliseconds at most.

    An engine's thread that is put aside in the middle of its work holds up all its others, but each gives its CPU away
    whenever the engine has told something (`worker.main`), with nothing in its hands. Processes and threads that are
    started from here are as usual.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # in a sandbox that forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


async def _work(service: Service, announce: Callable[[ServedModel], None]) -> None:
    """Load, and then wait for the engines of all models to be given up."""
    await service.load(announce)
    raise await service.clusters.failed()


async def _drain(service: Service, working: asyncio.Task[None], timeout: float) -> None:
    service.clusters.begin_drain()
    finished = await _idle_within(service, timeout)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await service.clusters.stop(LAST_ANSWERS if finished else 0)
    await _idle_within(service, LAST_ANSWERS)


async def _idle_within(service: Service, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await service.wait_idle()
    except TimeoutError:
        return False
    return True
