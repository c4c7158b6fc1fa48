"""Frames on a stream: four bytes of length (big-endian), then one MessagePack message.

Both ends come from one installation, or have found out before (`core/joining.py`) that they speak alike: there is no version in a frame.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_FRAME = 256 * 2**20
"""Bytes in one message; a longer one means that the stream is out of step."""

_LENGTH = struct.Struct(">I")


class BrokenStream(ConnectionError):
    """The stream ended inside a frame, or announces one that cannot be."""


def frame(message: Any) -> bytes:
    """`message` with its length in front."""
    body = msgspec.msgpack.encode(message)
    assert len(body) <= MAX_FRAME, f"a message of {len(body)} bytes is longer than {MAX_FRAME}"
    return _LENGTH.pack(len(body)) + body


def send(sock: socket.socket, message: Any) -> None:
    """Send `message`, blocking. Raises `ConnectionError` when the peer has gone."""
    sock.sendall(frame(message))


def receive(sock: socket.socket, limit: int = MAX_FRAME) -> bytes | None:
    """Wait for one encoded message; None at the end of the stream. Raises `ConnectionError`."""
    head = _receive_exactly(sock, _LENGTH.size)
    if not head:
        return None
    if len(head) < _LENGTH.size:
        raise BrokenStream("the stream ended inside a frame's length")
    length = _checked_length(head, limit)
    body = _receive_exactly(sock, length)
    if len(body) < length:
        raise BrokenStream(f"the stream ended after {len(body)} of {length} bytes")
    return body


class Frames:
    """Encoded messages, of `limit` bytes at most, out of a stream that arrives in pieces of any size."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The messages that are complete now. Raises `BrokenStream`."""
        self._pending += piece
        while len(self._pending) >= _LENGTH.size:
            end = _LENGTH.size + _checked_length(self._pending[: _LENGTH.size], self._limit)
            if len(self._pending) < end:
                return
            message = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield message


def _checked_length(head: bytes | bytearray, limit: int) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > limit:
        raise BrokenStream(f"a frame of {length} bytes is announced, but {limit} is the limit")
    return length


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes, fewer only at the end of the stream."""
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 2**20))
        if not part:
            break
        parts += part
    return bytes(parts)
