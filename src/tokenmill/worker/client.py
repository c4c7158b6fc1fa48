"""The other end of an engine process's stream, for asyncio."""

from __future__ import annotations

import asyncio
import collections
import socket
from collections.abc import AsyncGenerator

import msgspec

from tokenmill.core.clock import Clock, MonotonicClock
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDied, TokenmillError
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
        self.open: set[_Choice] = {(request.request_id, choice) for request in requests for choice in range(request.params.n)}

    def close(self, request_id: str, choice: int | None) -> None:
        if choice is None:
            self.open = {key for key in self.open if key[0] != request_id}
        else:
            self.open.discard((request_id, choice))


class EngineClient:
    """Requests to one engine process and their outputs. Made by `open`; ends with its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: Clock) -> None:
        self._reader = reader
        self._writer = writer
        self._clock = clock
        self._feeds: dict[str, _Feed] = {}
        self._stats: collections.deque[asyncio.Future[Stats]] = collections.deque()
        self._ended = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self.last_heard = clock.now()
        """When the engine last said anything, on the clock given to `open`."""

    @classmethod
    async def open(cls, sock: socket.socket, clock: Clock | None = None) -> EngineClient:
        """Take over `sock`, the connected end of a stream to an engine process."""
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer, clock or MonotonicClock())

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Have the engine built. Raises its error, or `EngineDied` when the process ends without one."""
        assert self._listener is None, "an engine is loaded once"
        self._writer.write(wire.frame(config))
        try:
            first = await wire.receive_async(self._reader)
        except ConnectionError:
            first = None
        if first is None:
            raise EngineDied("the engine process ended while it was loading the model: its log says why")
        message = msgspec.msgpack.decode(first, type=EngineInfo | Failed)
        if isinstance(message, Failed):
            raise message.error()
        self.last_heard = self._clock.now()
        self._listener = asyncio.create_task(self._listen(), name="engine client")
        return message

    async def generate(self, *requests: Generate) -> AsyncGenerator[SequenceOutput, None]:
        """Send requests and yield their outputs as they come, until every choice has had its last.

        Raises the error of the first request that is refused, and `EngineDied` when the connection ends. Whatever is
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

    async def close(self) -> None:
        """End the connection, and with it the engine process."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        self._end()
        self._writer.close()

    def _send(self, message: ToEngine) -> None:
        if not self._ended.is_set():
            self._writer.write(wire.frame(message))

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        try:
            while (message := await wire.receive_async(self._reader)) is not None:
                self.last_heard = self._clock.now()
                self._dispatch(decoder.decode(message))
        except ConnectionError:
            pass  # a process that is killed resets its stream: the same end
        finally:
            self._end()

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case StepOutput():
                for output in message.outputs:
                    feed = self._feeds.get(output.request_id)
                    if feed is not None:
                        feed.queue.put_nowait(output)
            case Failed():
                feed = self._feeds.get(message.request_id)
                if feed is not None:
                    feed.queue.put_nowait(message)
            case Stats():
                asked = self._stats.popleft()
                if not asked.done():
                    asked.set_result(message)
            case EngineInfo():
                raise AssertionError("an engine says only once that it is ready")

    def _end(self) -> None:
        self._ended.set()
        for feed in set(self._feeds.values()):
            feed.queue.put_nowait(_died())
        self._feeds.clear()
        while self._stats:
            asked = self._stats.popleft()
            if not asked.done():
                asked.set_exception(_died())


def _died() -> EngineDied:
    return EngineDied("the engine process ended while the request was in flight: send it again, the engine is being restarted")
