"""Connector `shm`, for workers on one host: the reader maps the door's pool and copies out of it, once.

The unix socket hands over the pool's descriptor, which cannot be written through (native/include/common.h), and says with each read whether
the frames are granted. Both sides must belong to the same user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
from collections.abc import Sequence

from tokenmill.core.errors import ConfigError
from tokenmill.kernels.frames import BLOCK, Checksum, Frames, KVMemory
from tokenmill.kernels.ops import Int32s
from tokenmill.transfer.connector import Connect, Door, Link, Lost, Options, Peer, Refused, Side
from tokenmill.transfer.door import SocketDoor, listen
from tokenmill.transfer.grants import Grant
from tokenmill.transfer.handshake import introduce
from tokenmill.transfer.link import SocketLink, opening
from tokenmill.transfer.listener import Session
from tokenmill.transfer.stream import Garbled, Stream

_NO_SECRET = b""
_CREDENTIALS = struct.Struct("iii")  # pid, uid, gid


def open_door(side: Side, options: Options) -> Door:
    """Raises `ConfigError` if the pool is not shared memory, or the socket's path cannot be had."""
    if side.memory.descriptor is None:
        raise ConfigError("connector shm needs a KV pool that other processes can map: build the tape with shared=True", param="connector")
    place = options.socket_path or f"@tokenmill-{secrets.token_hex(8)}"
    sock = listen(lambda: _bound(place), place)
    return SocketDoor(side, _Delivery(side.memory.descriptor), sock, f"shm:{place}", _NO_SECRET, options.timeout)


def connector(side: Side, options: Options) -> Connect:
    def connect(place: str) -> Link:
        with opening(f"shm:{place}", lambda: _reach(place, options)) as stream:
            peer = introduce(stream, side, _NO_SECRET)
            return SocketLink(f"shm:{place}", stream, peer, _Receipt(_receive_pool(stream, peer)))

    return connect


class _Delivery:
    """A byte that carries the pool's descriptor; then nothing: readers help themselves."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def accept(self, session: Session) -> None:
        if not _is_ours(session.sock):
            raise PermissionError("a reader belongs to another user")

    def open(self, stream: Stream) -> None:
        socket.send_fds(stream.sock, [b"\0"], [self._descriptor])

    def deliver(self, stream: Stream, frames: Frames, grant: Grant) -> None:
        pass


class _Receipt:
    """Copies out of the peer's pool. That may be the pool of a dead worker: it is unmapped with the link."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory: KVMemory | None = memory

    def take(self, stream: Stream, theirs: Sequence[Int32s], mine: Frames, check: Checksum) -> None:
        assert self._memory is not None, "a closed link"
        source = self._memory.frames(theirs)
        for start in range(0, mine.nbytes, BLOCK):
            stop = min(start + BLOCK, mine.nbytes)
            mine.copy(source, start, stop)
            check.advance(stop)

    def close(self) -> None:
        self._memory = None


def _reach(place: str, options: Options) -> Stream:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(options.timeout)
        try:
            sock.connect(_native_name(place))
        except (OSError, ValueError) as error:
            raise Lost("unreachable", f"no worker is at shm:{place}: {error}") from None
        if not _is_ours(sock):
            raise Refused("user", f"the process at shm:{place} belongs to another user")
    except BaseException:
        sock.close()
        raise
    return Stream(sock, options.timeout)


def _receive_pool(stream: Stream, peer: Peer) -> KVMemory:
    """Raises `Refused` for a pool that is not what the peer says it is, OSError."""
    _, descriptors, _, _ = socket.recv_fds(stream.sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise Garbled("no descriptor of a KV pool has come")
    try:
        return KVMemory.mapped(descriptors[0], peer.geometry)
    except (OSError, ValueError, OverflowError) as error:
        raise Refused("geometry", f"the peer's KV pool cannot be mapped: {error}") from None
    finally:
        os.close(descriptors[0])


def _native_name(place: str) -> str:
    return "\0" + place[1:] if place.startswith("@") else place


def _bound(place: str) -> socket.socket:
    """A socket that listens there. What a killed worker left behind is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not place.startswith("@"):
            _remove_left_behind(place)
        sock.bind(_native_name(place))
        sock.listen()
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_left_behind(path: str) -> None:
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _is_ours(sock: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())
