"""Connector `tcp`, for workers on different hosts: the door gathers frames and sends them, the reader scatters what comes.

Both sides must know one secret (handshake.py). Without TLS frames travel in the clear, and who can change packets can change them; the
checksum, which comes another way, tells.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
from collections.abc import Sequence

import numpy as np

from tokenmill.core.errors import ConfigError
from tokenmill.kernels.frames import BLOCK, Checksum, Frames
from tokenmill.kernels.ops import Int32s
from tokenmill.transfer.connector import Door, Link, Lost, Options, Peer, Refused, Side
from tokenmill.transfer.door import SocketDoor, listen
from tokenmill.transfer.grants import Grant
from tokenmill.transfer.handshake import introduce
from tokenmill.transfer.link import ask, losses
from tokenmill.transfer.listener import Session
from tokenmill.transfer.messages import REFUSALS
from tokenmill.transfer.stream import Stream

_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+)):(\d{1,5})")
_EVERYWHERE = ("", "0.0.0.0", "::")

_LENGTH = struct.Struct(">I")
"""Before each block of frames. 0: none comes any more, but a `Refusal`."""


def open_door(side: Side, options: Options) -> Door:
    """Raises `ConfigError` if there is no secret, no address for others, or no such port."""
    secret = options.require_secret()
    if options.host in _EVERYWHERE and options.advertise is None:
        raise ConfigError(
            f"connector tcp listens on host {options.host!r}, which is no address for others: name one that they reach this host by",
            param="advertise",
        )
    sock = listen(lambda: _bound(options.host, options.port), _address(options.host, options.port))
    address = f"tcp:{_address(options.advertise or options.host, sock.getsockname()[1])}"
    return SocketDoor(side, _Delivery(options), sock, address, secret, options.timeout)


def connect(address: str, side: Side, options: Options) -> Link:
    """address: without the connector's name. Raises `Refused`, `Lost`."""
    try:
        secret = options.require_secret()
    except ConfigError as error:
        raise Refused("secret", error.message) from None
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[3]) > 65535:
        raise Refused("address", f"tcp:{address} is no address: it must be HOST:PORT or [IPV6]:PORT")
    host = match[1] or match[2]
    try:
        sock = socket.create_connection((host, int(match[3])), options.timeout)
    except (OSError, UnicodeError) as error:
        raise Lost("unreachable", f"no worker is at tcp:{address}: {error}") from None
    try:
        _prepare(sock, options.timeout)
        with losses(f"tcp:{address}"):
            if options.reader_tls is not None:
                sock = options.reader_tls.wrap_socket(sock, server_hostname=host)
            stream = Stream(sock, options.timeout)
            return _Link(f"tcp:{address}", stream, introduce(stream, side, secret))
    except BaseException:
        sock.close()
        raise


class _Delivery:
    """Blocks, each with its length before it."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def accept(self, session: Session) -> None:
        _prepare(session.sock, self._options.timeout)
        tls = self._options.door_tls
        if tls is not None:
            session.wrap(lambda sock: tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
            assert isinstance(session.sock, ssl.SSLSocket)
            session.sock.do_handshake()

    def open(self, stream: Stream) -> None:
        pass

    def deliver(self, stream: Stream, frames: Frames, grant: Grant) -> None:
        block = np.empty(_LENGTH.size + min(BLOCK, frames.nbytes), np.uint8)
        data = block[_LENGTH.size :]
        for start in range(0, frames.nbytes, BLOCK):
            count = min(BLOCK, frames.nbytes - start)
            frames.gather(data[:count], start)
            if grant.revoked:  # what was gathered before may still be whole, but nobody vouches for it
                stream.send_bytes(_LENGTH.pack(0))
                raise Refused("nonce", "the grant was revoked while its frames were read")
            _LENGTH.pack_into(block.data, 0, count)
            stream.send_bytes(block.data[: _LENGTH.size + count])


class _Link:
    def __init__(self, address: str, stream: Stream, peer: Peer) -> None:
        self._address = address
        self._stream = stream
        self.peer = peer

    def fetch(self, nonce: bytes, theirs: Sequence[Int32s], mine: Frames, check: Checksum) -> None:
        with losses(self._address):
            ask(self._stream, nonce, theirs)
            block = np.empty(min(BLOCK, mine.nbytes), np.uint8)
            at = 0
            while at < mine.nbytes:
                count = self._stream.receive_length(min(BLOCK, mine.nbytes - at))
                if count == 0:
                    refusal = self._stream.receive(REFUSALS)
                    raise Refused(refusal.reason, refusal.detail)
                self._stream.receive_into(block.data[:count])
                mine.scatter(block[:count], at)
                at += count
                check.advance(at)

    def ended(self) -> bool:
        return not self._stream.quiet()

    def cut(self) -> None:
        self._stream.cut()

    def close(self) -> None:
        self._stream.close()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bound(host: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where[:2], family=family, dualstack_ipv6=both)


def _prepare(sock: socket.socket, timeout: float) -> None:
    """A peer whose host has vanished must not hold a connection for ever, even one on which nothing is asked for."""
    sock.settimeout(timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
