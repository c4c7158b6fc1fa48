"""Where workers of other hosts come to a gateway (`core/joining.py`)."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tokenmill.core.errors import ConfigError
from tokenmill.core.joining import (
    MAX_OPENING,
    OPENING_SECONDS,
    VERSION,
    Join,
    JoinRefused,
    Refusal,
    Welcome,
    check_name,
    check_version,
)
from tokenmill.core.proof import Challenge, Opening, draw, is_proven, prove
from tokenmill.core.sockets import show_address, watch_peer
from tokenmill.worker import wire
from tokenmill.worker.client import EngineClient

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""Connections of those who have not shown yet who they are. Of more the oldest has to go, so that nobody keeps workers out by connecting
and saying nothing."""

_PAUSE = 0.1
"""Seconds before another try, if the system has no descriptor left for a connection."""

_OPENINGS = msgspec.msgpack.Decoder(Opening)
_JOINS = msgspec.msgpack.Decoder(Join)


class Listening(NamedTuple):
    """sock: bound, and listening. secret: what all workers show. tls: None: in the clear."""

    sock: socket.socket
    secret: bytes
    tls: ssl.SSLContext | None = None


class Entrance:
    """Listens from `open` to `close`. What becomes of those who have come in is not its business."""

    def __init__(self, listening: Listening, admit: Callable[[Join], None], welcome: Callable[[Join, EngineClient], None]) -> None:
        """admit: raises `JoinRefused` for a worker that knows the secret, but is not wanted. welcome: gets the others."""
        self._listening = listening
        self._admit = admit
        self._welcome = welcome
        self._accepting: asyncio.Task[None] | None = None
        self._strangers: dict[asyncio.Task[None], None] = {}

    def open(self) -> None:
        self._listening.sock.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="entrance")

    async def close(self) -> None:
        tasks = [*self._strangers, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listening.sock)
            except OSError as error:
                log.warning("no worker can come in for a moment: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                oldest.cancel()
                del self._strangers[oldest]
            stranger = asyncio.create_task(self._receive(sock))
            self._strangers[stranger] = None
            stranger.add_done_callback(lambda task: self._strangers.pop(task, None))
            await asyncio.sleep(0)  # a task that is cancelled before it has begun does not close its socket

    async def _receive(self, sock: socket.socket) -> None:
        """Until who has connected is welcomed, or is not."""
        loop, tls = asyncio.get_running_loop(), self._listening.tls
        transport: asyncio.Transport | None = None
        welcome = False
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                where = show_address(*sock.getpeername()[:2])
                watch_peer(sock)
                transport, knock = await loop.connect_accepted_socket(_Knock, sock, ssl=tls)
                try:
                    join = await self._examine(transport, knock)
                except JoinRefused as refused:
                    log.warning("a worker at %s is refused: %s", where, refused.detail)
                    transport.write(wire.frame(Refusal(refused.reason, refused.detail)))
                    transport.close()
                    await knock.ended
                    return
            welcome = not transport.is_closing()
        except OSError as error:
            log.debug("a connection ended before it was known whose it is: %s", error)
        finally:
            if transport is None:
                sock.close()
            elif not welcome:
                transport.abort()
        if welcome and transport is not None:
            self._welcome(join, EngineClient.over(transport))

    async def _examine(self, transport: asyncio.Transport, knock: _Knock) -> Join:
        """Who it is, once it has been told that it is welcome. Raises `JoinRefused` and OSError."""
        secret = self._listening.secret
        challenge = Challenge(version=VERSION, fresh=draw())
        transport.write(wire.frame(challenge))
        body = await knock.message
        try:
            check_version(_OPENINGS.decode(body).version, "worker", "gateway")
            join = _JOINS.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise wire.BrokenStream(f"it does not speak as a worker: {error}") from None
        if not is_proven(secret, "worker", challenge.fresh, join):
            raise JoinRefused("secret", "it does not know the gateway's secret: give both the same file")
        try:
            check_name(join.name)
        except ConfigError as error:
            raise JoinRefused("worker", error.message) from None
        self._admit(join)
        welcome = Welcome()
        transport.write(wire.frame(msgspec.structs.replace(welcome, proof=prove(secret, "gateway", join.fresh, welcome))))
        return join


class _Knock(asyncio.Protocol):
    """Of a stranger, who may say one thing. message: what it is. ended: the connection has."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.message: asyncio.Future[bytes] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._frames = wire.Frames(MAX_OPENING)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                if self.message.done():
                    raise wire.BrokenStream("it says more than it was asked for")
                self.message.set_result(message)
        except wire.BrokenStream as error:
            self._transport.abort()
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(wire.BrokenStream("it has gone"))
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, error: wire.BrokenStream) -> None:
        if not self.message.done():
            self.message.set_exception(error)
            self.message.exception()  # seen, even if nobody waits any more
