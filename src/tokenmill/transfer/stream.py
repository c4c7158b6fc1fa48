"""Messages and bytes on a socket, bounded in length and in time.

A message is four bytes of length (big-endian) and a MessagePack value. Whatever is wrong with a stream is an `OSError`, and ends it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from typing import Any, TypeVar

import msgspec

MAX_MESSAGE = 1 << 20
"""Bytes. A request names its frames in four bytes each, so 128K tokens of 8 KV groups take half of it."""

MAX_OPENING = 1 << 12
"""Bytes of a message from someone who has proven nothing yet."""

_LENGTH = struct.Struct(">I")

T = TypeVar("T")


def cut(sock: socket.socket) -> None:
    """End both directions, from any thread: whoever waits on the socket is woken, and closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS would take its own state from under the other thread


class Ended(ConnectionError):
    """The other side has closed the stream."""


class Garbled(ConnectionError):
    """The other side says what nobody of ours would."""


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Raises `Garbled`."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled(f"a message is none of {decoder.type}: {error}") from None


class Stream:
    """One end. timeout: seconds that each message or block of bytes may take; then `TimeoutError`."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self.sock = sock
        self._timeout = timeout

    def send(self, message: Any) -> None:
        body = msgspec.msgpack.encode(message)
        assert len(body) <= MAX_MESSAGE, f"a message of {len(body)} bytes"
        self.send_bytes(_LENGTH.pack(len(body)) + body)

    def send_bytes(self, data: bytes | memoryview) -> None:
        self.sock.settimeout(self._timeout)
        self.sock.sendall(data)

    def receive(self, decoder: msgspec.msgpack.Decoder[T], limit: int = MAX_MESSAGE) -> T:
        """The next message, which must be of the decoder's type and have no more than `limit` bytes."""
        return decode(decoder, self.receive_message(limit))

    def receive_message(self, limit: int) -> bytes:
        """The same as it was sent."""
        length = self.receive_length(limit)
        body = bytearray(length)
        self.receive_into(memoryview(body))
        return bytes(body)

    def wait(self) -> None:
        """Until something comes, or the end, however long it takes."""
        self._something(None)

    def quiet(self) -> bool:
        """Whether nothing has come, the end neither."""
        return not self._something(0)

    def receive_into(self, data: memoryview) -> None:
        """Fill `data`."""
        deadline = time.monotonic() + self._timeout
        at = 0
        while at < len(data):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{len(data) - at} of {len(data)} bytes did not come within {self._timeout:g} s")
            self.sock.settimeout(left)
            count = self.sock.recv_into(data[at:])
            if count == 0:
                raise Ended("the stream ended")
            at += count

    def receive_length(self, limit: int) -> int:
        """Four bytes that say how many follow, which must be no more than `limit`."""
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head))
        length: int = _LENGTH.unpack(head)[0]
        if length > limit:
            raise Garbled(f"a message of {length} bytes is announced, but {limit} is the limit")
        return length

    def cut(self) -> None:
        cut(self.sock)

    def close(self) -> None:
        self.sock.close()

    def _something(self, timeout: int | None) -> bool:
        if isinstance(self.sock, ssl.SSLSocket) and self.sock.pending():
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(timeout))
