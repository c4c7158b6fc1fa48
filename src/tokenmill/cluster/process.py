"""One engine process on this host: started, loaded, ended."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import sys
from collections.abc import Sequence

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDied
from tokenmill.core.messages import EngineInfo
from tokenmill.worker.client import EngineClient

WORKER_COMMAND = (sys.executable, "-P", "-m", "tokenmill.worker.main")
"""-P: a stray module in the current folder is not the standard library's."""


class WorkerProcess:
    """A process and the client that speaks to it. Whoever starts one ends it with `kill` or by a drain, and then `wait`s."""

    def __init__(self, process: asyncio.subprocess.Process, client: EngineClient) -> None:
        self._process = process
        # A signal to the process's number could meet another process, and asyncio's own way takes the exit status of one that has
        # ended from whoever waits for it.
        self._handle: io.FileIO | None = None
        with contextlib.suppress(ProcessLookupError):  # one that ended at once, and was waited for already
            self._handle = io.FileIO(os.pidfd_open(process.pid))
        self.client = client

    @classmethod
    async def start(cls, command: Sequence[str] = WORKER_COMMAND) -> WorkerProcess:
        """Start `command` with the descriptor of its end of a new socket pair as last argument."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),
                    # Ctrl-C in a terminal reaches the whole foreground group; only the supervisor may end this process.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, await EngineClient.open(ours))

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Build the engine. Raises its error; a process that ends without one is `EngineDied` with its end told."""
        try:
            return await self.client.load(config)
        except EngineDied:
            how = describe_exit(await self.wait())
            raise EngineDied(f"the engine process {how} while it was loading {config.model}: its log says why") from None

    def kill(self) -> None:
        if self._handle is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle.fileno(), signal.SIGKILL)

    async def wait(self) -> int:
        """The exit status (a signal's number negated), once the process is gone."""
        status = await self._process.wait()
        if self._handle is not None:
            self._handle.close()
        await self.client.close()
        return status


def describe_exit(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status) or 'unknown'})"
