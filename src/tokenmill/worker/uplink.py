"""A worker's connection to a gateway on another host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import msgspec

from tokenmill.core.errors import ConfigError
from tokenmill.core.handover import FromWorker
from tokenmill.core.joining import MAX_OPENING, OPENING_SECONDS, Answer, Join, JoinRefused, Refusal, check_version
from tokenmill.core.proof import Challenge, Opening, draw, is_proven, prove
from tokenmill.core.sockets import show_address, watch_peer
from tokenmill.worker import wire

log = logging.getLogger(__name__)

_LAST_WORDS = 5.0
"""Seconds for the gateway to take what it was told last."""

_BLOCK = 2**16

_OPENINGS = msgspec.msgpack.Decoder(Opening)
_CHALLENGES = msgspec.msgpack.Decoder(Challenge)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

T = TypeVar("T")


class GatewayAddress(NamedTuple):
    """secret: what it shares with its workers. tls: None sends in the clear."""

    host: str
    port: int
    secret: bytes
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return show_address(self.host, self.port)

    def own_host(self) -> str:
        """By which address this host goes there, which is one that others reach it by. Raises `ConfigError` if there is no way."""
        try:
            family, kind, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as sock:
                sock.connect(where)  # which sends nothing
                host: str = sock.getsockname()[0]
        except OSError as error:
            raise ConfigError(f"there is no way to the gateway at {self}: {error}", param="join") from None
        return host


class Uplink:
    """A connection by which a gateway has welcomed this worker. Whoever made it closes it."""

    def __init__(self, sock: socket.socket, pump: threading.Thread | None) -> None:
        self.sock = sock
        self._pump = pump
        self._broken = False

    def send(self, message: FromWorker) -> None:
        """From one thread at a time. Nothing happens once the connection has ended, which whoever reads from it sees."""
        if self._broken:
            return
        try:
            wire.send(self.sock, message)
        except OSError:
            self._broken = True
            _cut(self.sock)

    def close(self, wait_for_end: Callable[[float], None]) -> None:
        """wait_for_end: by whoever reads, for at most so many seconds. A connection that is closed while something has not been read is
        reset, and the other side may lose what it was sent last."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        wait_for_end(_LAST_WORDS)
        _cut(self.sock)
        wait_for_end(_LAST_WORDS)
        self.sock.close()
        if self._pump is not None:
            self._pump.join(_LAST_WORDS)


def reach(gateway: GatewayAddress, join: Join) -> Uplink:
    """Connect, and present this worker; `join` without version, number and proof. Raises `JoinRefused`, and OSError."""
    sock = socket.create_connection((gateway.host, gateway.port), OPENING_SECONDS)
    pump = None
    try:
        watch_peer(sock)
        if gateway.tls is not None:
            sock, pump = _encrypted(sock, gateway.tls, gateway.host)
        sock.settimeout(OPENING_SECONDS)
        _introduce(sock, gateway.secret, join)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return Uplink(sock, pump)


def _introduce(sock: socket.socket, secret: bytes, join: Join) -> None:
    body = _receive(sock)
    check_version(_decode(_OPENINGS, body).version, "gateway", "worker")
    challenge = _decode(_CHALLENGES, body)
    join = msgspec.structs.replace(join, version=challenge.version, fresh=draw())
    wire.send(sock, msgspec.structs.replace(join, proof=prove(secret, "worker", challenge.fresh, join)))
    answer = _decode(_ANSWERS, _receive(sock))
    if isinstance(answer, Refusal):
        raise JoinRefused(answer.reason, answer.detail)
    if not is_proven(secret, "gateway", join.fresh, answer):
        raise JoinRefused("secret", "the gateway does not know this worker's secret: give both the same file")


def _receive(sock: socket.socket) -> bytes:
    body = wire.receive(sock, MAX_OPENING)
    if body is None:
        raise wire.BrokenStream("it closed the connection before it had said who it is")
    return body


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise wire.BrokenStream(f"it does not speak as a gateway: {error}") from None


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


# A TLS connection is for one thread at a time, and here one reads and another writes. So a third has it to itself, and a socket pair
# carries what is in the clear.


def _encrypted(sock: socket.socket, context: ssl.SSLContext, host: str) -> tuple[socket.socket, threading.Thread]:
    """This process's end of such a pair. Raises OSError."""
    ours, theirs = socket.socketpair()
    connected: Future[None] = Future()

    def pump() -> None:
        asyncio.run(_pump(sock, theirs, context, host, connected))

    thread = threading.Thread(target=pump, name="tls", daemon=True)
    thread.start()
    try:
        connected.result()
    except BaseException:
        ours.close()
        raise
    return ours, thread


async def _pump(sock: socket.socket, theirs: socket.socket, context: ssl.SSLContext, host: str, connected: Future[None]) -> None:
    sock.setblocking(False)
    theirs.setblocking(False)
    try:
        far = await asyncio.open_connection(sock=sock, ssl=context, server_hostname=host, ssl_handshake_timeout=OPENING_SECONDS)
    except BaseException as error:
        sock.close()
        theirs.close()
        connected.set_exception(error)
        return
    near = await asyncio.open_connection(sock=theirs)
    connected.set_result(None)
    await asyncio.gather(_copy(far[0], near[1]), _copy(near[0], far[1]))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """All that comes, and the end of it. TLS ends in both directions at once."""
    with contextlib.suppress(OSError):
        while data := await source.read(_BLOCK):
            target.write(data)
            await target.drain()
    target.close()
    with contextlib.suppress(OSError):
        await target.wait_closed()
