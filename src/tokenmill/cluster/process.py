"""Processes on this host: one by its descriptor, and one with an engine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDied
from tokenmill.core.messages import EngineInfo
from tokenmill.worker.client import EngineClient
from tokenmill.worker.nursery import exit_status


class ProcessHandle:
    """A process by its pidfd: a signal to its number could meet another process. Somebody says once how its end becomes known, by
    `watch`, or by `tell` when it has ended."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = io.FileIO(pidfd)
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int | None] = self._loop.create_future()

    def kill(self) -> None:
        if not self._status.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd.fileno(), signal.SIGKILL)

    async def wait(self) -> int | None:
        """The exit status (a signal's number negated) once the process is gone; None if it was lost, see `watch`."""
        return await asyncio.shield(self._status)

    def watch(self) -> None:
        """See the end from here. How it ended is known then only if it is a child of this process."""
        self._loop.add_reader(self._pidfd, self._see_end)

    def tell(self, status: int | None) -> None:
        """The process has ended."""
        self._pidfd.close()
        self._status.set_result(status)

    def _see_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.tell(exit_status(self._pidfd.fileno()))


class WorkerProcess:
    """A process and the client that speaks to it. Whoever has one ends it with `kill` or by a drain, and then `wait`s."""

    def __init__(self, handle: ProcessHandle, client: EngineClient) -> None:
        self._handle = handle
        self.client = client

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Build the engine. Raises its error; a process that ends without one is `EngineDied` with its end told."""
        try:
            return await self.client.load(config)
        except EngineDied:
            how = describe_exit(await self.wait())
            raise EngineDied(f"the engine process {how} while it was loading {config.model}: its log says why") from None

    def kill(self) -> None:
        self._handle.kill()

    async def wait(self) -> int | None:
        """As `ProcessHandle.wait`."""
        status = await self._handle.wait()
        await self.client.close()
        return status


def describe_exit(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "ended, and nobody knows how, since the process that had forked it ended before"
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status) or 'unknown'})"
