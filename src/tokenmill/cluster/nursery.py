"""Where the engine processes of one model on this host come from: one process that holds the weights and forks them."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import socket
import sys
from collections.abc import Sequence

import msgspec

from tokenmill.cluster.process import ProcessHandle, WorkerProcess, describe_exit
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDied, Unavailable
from tokenmill.core.messages import Failed
from tokenmill.worker import control
from tokenmill.worker.client import EngineClient
from tokenmill.worker.control import Ended, Fork, Forked, FromNursery, Loaded

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "tokenmill.worker.main")
"""-P: a stray module in the current folder is not the standard library's."""

FORK_WITHIN = 30.0
"""Seconds for a fork, which takes some hundredths of one. Who does not give one hangs, or was stopped."""


class Nursery:
    """Starts its process when the first worker is asked for, and another one when it has ended: workers outlive it, and go on with
    what they have of it. Whoever makes one closes it, after its workers."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = WORKER_COMMAND) -> None:
        """config: what is loaded (`engine.shared.Shared.serves` says for whom). command: gets the descriptor of its end of a control
        socket as last argument."""
        self._config = config
        self._command = command
        self._process: asyncio.Task[_Process] | None = None

    async def spawn(self) -> WorkerProcess:
        """A new process, which is still to `load` its engine. The weights are in memory then. Several may be asked for at a time.

        Raises the error of a load that fails, which each further call tries anew, `EngineDied` and `Unavailable`.
        """
        return await (await self._loaded()).fork()

    async def close(self) -> None:
        """End the process, be it loading. What becomes of workers that are still there is not known then, other than that they end."""
        task, self._process = self._process, None
        if task is not None:
            task.cancel()
            for ended in await asyncio.gather(task, return_exceptions=True):
                if isinstance(ended, _Process):
                    await ended.close()

    async def _loaded(self) -> _Process:
        if self._process is None or _failed(self._process):
            self._process = asyncio.create_task(self._load(), name="nursery")
        elif self._process.done() and self._process.result().ended:
            self._process = asyncio.create_task(self._load(self._process.result()), name="nursery")
        # Not ended by one of several callers that gives up.
        return await asyncio.shield(self._process)

    async def _load(self, before: _Process | None = None) -> _Process:
        if before is not None:
            log.warning("the process with the model %s: it is loaded again", describe_exit(await before.close()))
        process = _Process.start(self._command)
        try:
            await process.load(self._config)
        except BaseException:
            await process.close()
            raise
        return process


def _failed(task: asyncio.Task[_Process]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class _Process:
    """A nursery (`worker/nursery.py`) and this side of its control socket."""

    def __init__(self, handle: ProcessHandle, sock: socket.socket) -> None:
        self._handle = handle
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._decoder: msgspec.msgpack.Decoder[FromNursery] = msgspec.msgpack.Decoder(FromNursery)
        self._asked: collections.deque[asyncio.Future[ProcessHandle | None]] = collections.deque()
        self._workers: dict[int, ProcessHandle] = {}
        """By number, which stays theirs until the nursery has told their end."""
        self._unclaimed: set[ProcessHandle] = set()
        """Those of callers that gave up. They end with their streams."""
        self.ended = False
        handle.watch()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._receive)

    @classmethod
    def start(cls, command: Sequence[str]) -> _Process:
        ours, theirs = control.pair()
        with theirs:
            number = theirs.fileno()
            try:
                pid = os.posix_spawn(
                    command[0],
                    [*command, str(number)],
                    os.environ,
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, sys.stderr.fileno(), 1),
                        (os.POSIX_SPAWN_DUP2, number, number),  # inherited
                    ],
                    # Ctrl-C in a terminal reaches the whole foreground group; only the supervisor may end these processes.
                    setsid=True,
                )
            except BaseException:
                ours.close()
                raise
        return cls(ProcessHandle(os.pidfd_open(pid)), ours)

    async def load(self, config: EngineConfig) -> None:
        """Raises the error of the load; a process that ends without one is `EngineDied` with its end told."""
        try:
            await self._ask(config)
        except EngineDied:
            how = describe_exit(await self._handle.wait())
            raise EngineDied(f"the process for the model {how} while it was loading {config.model}: its log says why") from None

    async def fork(self) -> WorkerProcess:
        """Raises `EngineDied` if this process ends, `Unavailable` if the system gives no other, or if this one hangs; then it is killed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            client = await EngineClient.open(ours)
            answer = self._ask(Fork(), theirs.fileno())
        try:
            async with asyncio.timeout(FORK_WITHIN):
                handle = await answer
        except TimeoutError:
            self._handle.kill()
            await client.close()
            raise Unavailable(f"the process that holds the model hangs: it gave no engine process for {FORK_WITHIN:.0f} s") from None
        except BaseException:
            await client.close()  # which ends the worker too
            raise
        assert handle is not None, "a fork is answered by a process"
        self._unclaimed.discard(handle)
        return WorkerProcess(handle, client)

    async def close(self) -> int | None:
        """Kill it, if it has not ended. Returns its exit status."""
        self._handle.kill()
        status = await self._handle.wait()
        self._end()
        for worker in self._unclaimed:
            await worker.wait()
        return status

    def _ask(self, message: EngineConfig | Fork, descriptor: int | None = None) -> asyncio.Future[ProcessHandle | None]:
        future: asyncio.Future[ProcessHandle | None] = self._loop.create_future()
        if self.ended:
            future.set_exception(_died())
            return future
        try:
            control.send(self._sock, message, descriptor)
        except ConnectionError:
            future.set_exception(_died())
        except OSError as error:
            future.set_exception(Unavailable(f"the process that holds the model cannot be asked for an engine process: {error}"))
        else:
            self._asked.append(future)
        return future

    def _receive(self) -> None:
        try:
            packet = control.receive(self._sock)
        except BlockingIOError:
            return
        if packet is None:
            return self._end()
        match self._decoder.decode(packet.data):
            case Ended() as ended:
                worker = self._workers.pop(ended.pid, None)
                if worker is not None:
                    worker.tell(ended.status)
                    self._unclaimed.discard(worker)
            case Forked() as forked if packet.descriptor is not None:
                handle = self._workers[forked.pid] = ProcessHandle(packet.descriptor)
                self._unclaimed.add(handle)
                self._answer(handle)
            case Forked():  # it ends with its stream
                self._answer(Unavailable("an engine process was forked, but this process may open no more descriptors"))
            case Loaded():
                self._answer(None)
            case Failed() as failed:
                self._answer(failed.error())

    def _answer(self, with_: ProcessHandle | Exception | None) -> None:
        future = self._asked.popleft()
        if future.done():
            return
        if isinstance(with_, Exception):
            future.set_exception(with_)
        else:
            future.set_result(with_)

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        while self._asked:
            self._answer(_died())
        for worker in self._workers.values():
            worker.watch()
        self._workers.clear()


def _died() -> EngineDied:
    return EngineDied("the process that holds the model has ended, before it could fork an engine process: the model is loaded again")
