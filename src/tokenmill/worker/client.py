"""The other end of an engine process's stream, for asyncio."""

from __future__ import annotations

import asyncio
import collections
import socket
from collections.abc import AsyncGenerator, Callable

import msgspec

from tokenmill.core.clock import Clock, MonotonicClock
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDied, ModelBroken, TokenmillError
from tokenmill.core.messages import (
    Abort,
    Drain,
    EngineInfo,
    Failed,
    FromEngine,
    Generate,
    GetStats,
    SequenceOutput,
    Stats,
    StepOutput,
    ToEngine,
)
from tokenmill.core.types import FinishReason
from tokenmill.worker import wire

_Choice = tuple[str, int]


class _Feed:
    """What has arrived for one `generate` and which of its choices are still to come. None wakes the reader."""

    def __init__(self, requests: tuple[Generate, ...]) -> None:
        self.queue: asyncio.Queue[SequenceOutput | Failed | TokenmillError | None] = asyncio.Queue()
        self.open: set[_Choice] = {(request.request_id, choice) for request in requests for choice in request.choices}

    def close(self, request_id: str, choice: int | None) -> None:
        if choice is None:
            self.open = {key for key in self.open if key[0] != request_id}
        else:
            self.open.discard((request_id, choice))


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
        except wire.BrokenStream:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()


class EngineClient:
    """Requests to one engine process and their outputs. Made by `open`; ends with its connection."""

    def __init__(self, clock: Clock) -> None:
        self._stream = _Stream(self._receive, self._end)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._clock = clock
        self._feeds: dict[str, _Feed] = {}
        self._stats: collections.deque[asyncio.Future[Stats]] = collections.deque()
        self._ended = asyncio.Event()
        self._loaded: asyncio.Future[EngineInfo] | None = None
        self.last_heard = clock.now()
        """When the engine last said anything, on the clock given to `open`."""

    @classmethod
    async def open(cls, sock: socket.socket, clock: Clock | None = None) -> EngineClient:
        """Take over `sock`, the connected end of a stream to an engine process."""
        client = cls(clock or MonotonicClock())
        await asyncio.get_running_loop().create_unix_connection(lambda: client._stream, sock=sock)
        return client

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Have the engine built. Raises its error, or `EngineDied` when the process ends without one."""
        assert self._loaded is None, "an engine is loaded once"
        if self._ended.is_set():
            raise _died_loading()
        self._loaded = asyncio.get_running_loop().create_future()
        self._send(config)
        return await self._loaded

    async def generate(self, *requests: Generate) -> AsyncGenerator[SequenceOutput, None]:
        """Send requests and yield their outputs as they come, until every choice has had its last.

        Raises the error of the first request that is refused, `ModelBroken`, and `EngineDied` when the connection ends. Whatever is
        unfinished when the generator ends, is closed or is cancelled is aborted at once. Wrap it in
        `contextlib.aclosing`, as a generator that is merely dropped is closed only later.
        """
        if self._ended.is_set():
            raise _died()
        feed = _Feed(requests)
        try:
            for request in requests:
                assert request.request_id not in self._feeds, f"request id {request.request_id} is in use"
                self._feeds[request.request_id] = feed
                self._send(request)
            while feed.open:
                match await feed.queue.get():
                    case SequenceOutput() as output if (output.request_id, output.choice) in feed.open:
                        if output.finish_reason is not None:
                            feed.close(output.request_id, output.choice)
                        if output.finish_reason is FinishReason.BROKEN:
                            raise ModelBroken.at_next_token()
                        yield output
                    case Failed() as failed:
                        feed.close(failed.request_id, None)
                        raise failed.error()
                    case TokenmillError() as error:
                        feed.open.clear()
                        raise error
        finally:
            for request in requests:
                self._feeds.pop(request.request_id, None)
            for request_id in sorted({key[0] for key in feed.open}):
                self._send(Abort(request_id))

    def abort(self, request_id: str, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Stop a request, or one of its choices, at once. Nothing more is yielded for it. Unknown ids are let pass:
        its last output may be under way."""
        feed = self._feeds.get(request_id)
        if feed is not None:
            feed.close(request_id, choice)
            feed.queue.put_nowait(None)
            self._send(Abort(request_id, choice, reason))

    async def stats(self) -> Stats:
        """The engine's counters, between two of its steps. Raises `EngineDied`."""
        if self._ended.is_set():
            raise _died()
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._send(GetStats())
        return await future

    def drain(self) -> None:
        """Let the engine finish what it has, and then end."""
        self._send(Drain())

    async def wait_ended(self) -> None:
        """Return when the connection has ended."""
        await self._ended.wait()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def close(self, why: TokenmillError | None = None) -> None:
        """End the connection, and with it the engine process. Requests in flight raise `why`, or `EngineDied`."""
        self._end(why)
        self._stream.transport.close()

    def _send(self, message: EngineConfig | ToEngine) -> None:
        if not self._ended.is_set():
            self._stream.transport.write(wire.frame(message))

    def _receive(self, data: bytes) -> None:
        self.last_heard = self._clock.now()
        match self._decoder.decode(data):
            case StepOutput() as step:
                for output in step.outputs:
                    feed = self._feeds.get(output.request_id)
                    if feed is not None:
                        feed.queue.put_nowait(output)
            case Failed() as failed:
                feed = self._feeds.get(failed.request_id)
                if feed is not None:
                    feed.queue.put_nowait(failed)
                elif self._loaded is not None and not self._loaded.done():
                    self._loaded.set_exception(failed.error())
            case Stats() as stats:
                asked = self._stats.popleft()
                if not asked.done():
                    asked.set_result(stats)
            case EngineInfo() as info:
                assert self._loaded is not None, "an engine says that it is ready when it was asked to be"
                if not self._loaded.done():
                    self._loaded.set_result(info)

    def _end(self, why: TokenmillError | None = None) -> None:
        self._ended.set()
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(_died_loading())
        for feed in set(self._feeds.values()):
            feed.queue.put_nowait(why or _died())
        self._feeds.clear()
        while self._stats:
            asked = self._stats.popleft()
            if not asked.done():
                asked.set_exception(_died())


def _died() -> EngineDied:
    return EngineDied("the engine process ended while the request was in flight: send it again, the engine is being restarted")


def _died_loading() -> EngineDied:
    return EngineDied("the engine process ended while it was loading the model: its log says why")
