"""The other end of an engine process's stream, for asyncio."""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from tokenmill.core.clock import Clock, MonotonicClock
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDied
from tokenmill.core.handover import FromWorker, ToWorker
from tokenmill.core.messages import Drain, EngineInfo, Failed, GetStats, Stats
from tokenmill.worker import wire

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who hears what an engine says once it is loaded."""

    def heard(self, message: FromWorker) -> None: ...

    def ended(self) -> None:
        """The stream has ended; nothing more comes."""
        ...


class _Stream(asyncio.Protocol):
    """Hands on each message where it arrives, which a reader and its task would do two turns of the event loop later."""

    def __init__(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._frames = wire.Frames()
        self._on_message, self._on_end = on_message, on_end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except (wire.BrokenStream, msgspec.MsgspecError) as error:
            log.error("an engine process says what none of this release would: %s", error)
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()


class EngineClient:
    """The stream to one engine process. Made by `open` or `over`; ends with its connection."""

    def __init__(self, clock: Clock) -> None:
        self._stream = _Stream(self._receive, self._end)
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._clock = clock
        self._listener: Listener | None = None
        self._asked: collections.deque[asyncio.Future[Stats] | None] = collections.deque()  # None: whoever listens hears it
        self._ended = asyncio.Event()
        self._loaded: asyncio.Future[EngineInfo] | None = None
        self.last_heard = clock.now()
        """When the engine last said anything, on the clock that it was made with."""

    @classmethod
    async def open(cls, sock: socket.socket, clock: Clock | None = None) -> EngineClient:
        """Take over `sock`, the connected end of a stream to an engine process."""
        client = cls(clock or MonotonicClock())
        await asyncio.get_running_loop().create_unix_connection(lambda: client._stream, sock=sock)
        return client

    @classmethod
    def over(cls, transport: asyncio.Transport, clock: Clock | None = None) -> EngineClient:
        """Take over a connection at whose other end there is an engine already."""
        client = cls(clock or MonotonicClock())
        client._stream.connection_made(transport)
        transport.set_protocol(client._stream)
        return client

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Have the engine built. Raises its error, or `EngineDied` when the process ends without one."""
        assert self._loaded is None, "an engine is loaded once"
        if self._ended.is_set():
            raise _died_loading()
        self._loaded = asyncio.get_running_loop().create_future()
        self._write(config)
        return await self._loaded

    def attach(self, listener: Listener) -> None:
        """Have `listener` told what the engine says from now on. At once, that the stream has ended, if it has."""
        assert self._listener is None, "one listens"
        self._listener = listener
        if self._ended.is_set():
            listener.ended()

    def send(self, message: ToWorker) -> None:
        """Nothing happens if the stream has ended."""
        self._write(message)

    def ask(self) -> None:
        """Have the engine tell its counters to whoever listens."""
        self._asked.append(None)
        self._write(GetStats())

    async def stats(self) -> Stats:
        """The engine's counters, between two of its steps. Raises `EngineDied`."""
        if self._ended.is_set():
            raise _died()
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._write(GetStats())
        return await future

    def drain(self) -> None:
        """Let the engine finish what it has, and then end."""
        self._write(Drain())

    async def wait_ended(self) -> None:
        """Return when the connection has ended."""
        await self._ended.wait()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def close(self) -> None:
        """End the connection, and with it the engine process."""
        self._end()
        self._stream.transport.close()

    def cut(self) -> None:
        """End the connection at once; what is on its way is lost."""
        self._end()
        self._stream.transport.abort()

    def _write(self, message: EngineConfig | ToWorker) -> None:
        if not self._ended.is_set():
            self._stream.transport.write(wire.frame(message))

    def _receive(self, data: bytes) -> None:
        self.last_heard = self._clock.now()
        message = self._decoder.decode(data)
        if self._loaded is not None and not self._loaded.done():
            match message:
                case EngineInfo():
                    self._loaded.set_result(message)
                case Failed():
                    self._loaded.set_exception(message.error())
            return
        if isinstance(message, Stats):
            asked = self._asked.popleft()
            if asked is not None and not asked.done():
                asked.set_result(message)
        if self._listener is not None and not self._ended.is_set():
            self._listener.heard(message)

    def _end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(_died_loading())
        while self._asked:
            asked = self._asked.popleft()
            if asked is not None and not asked.done():
                asked.set_exception(_died())
        if self._listener is not None:
            self._listener.ended()


def _died() -> EngineDied:
    return EngineDied("the engine process has ended: send the request again, it is being restarted")


def _died_loading() -> EngineDied:
    return EngineDied("the engine process ended while it was loading the model: its log says why")
