"""What a nursery (`worker/nursery.py`) and whoever started it say to each other.

One MessagePack message per packet, with at most one descriptor. Packets and not a stream, so that a descriptor stays with its message.
The first packet to a nursery is the `EngineConfig` of what it is to load, answered by `Loaded` or `Failed`; each further one is a
`Fork`, answered by `Forked` or `Failed`, in order. `Ended` comes unasked.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import Failed

_MAX_PACKET = 2**18
"""Bytes; what a socket holds by default is less."""


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Fork a worker. Its end of a stream comes with it."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Workers can be forked."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """The worker is there. Its pidfd comes with it: the number alone could be another process's by the time that it is read."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker has ended. status: a signal's number is negated."""

    pid: int
    status: int


FromNursery = Loaded | Forked | Ended | Failed


class Packet(NamedTuple):
    """descriptor: the receiver's to close."""

    data: bytes
    descriptor: int | None


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a control socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: EngineConfig | Fork | FromNursery, descriptor: int | None = None) -> None:
    """Raises OSError: a `ConnectionError` when the other side has gone."""
    data = msgspec.msgpack.encode(message)
    if descriptor is None:
        sock.send(data)
    else:
        socket.send_fds(sock, [data], [descriptor])


def receive(sock: socket.socket) -> Packet | None:
    """The next packet; None when the other side has gone. A process that may open no more descriptors receives none. Raises OSError."""
    try:
        data, descriptors, _, _ = socket.recv_fds(sock, _MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    return Packet(data, descriptors[0] if descriptors else None) if data else None
