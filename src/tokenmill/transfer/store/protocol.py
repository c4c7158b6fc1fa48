"""The bytes of commands and answers, as far as the client package's own way is not good enough for large values.

It reads a value in pieces, which it joins and then copies out into new memory, and its timeout is for each piece: a value that trickles in
may take for ever. Here a value is copied once, by the kernel, to where the caller has room for it, and an answer takes at most twice
`socket_timeout`, however it comes (`sendall` bounds each piece that is sent). Commands are packed here because the package packs them
otherwise, and takes no views, where its C extension is installed.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import Any

from valkey.exceptions import ConnectionError as LostConnection
from valkey.exceptions import InvalidResponse, ResponseError

from tokenmill.transfer.store.entry import Data

_MOST_ITEMS = 1 << 16
_LONG = 4096


class Refusal(ResponseError):
    """The server's own word that it does not do something. code: the first word, as `OOM`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class CommandPacker:
    """What the client package takes as `command_packer`."""

    def pack(self, *arguments: str | int | Data) -> list[Data]:
        """A command as pieces to be sent one after the other; long arguments are pieces of their own, not copied."""
        pieces: list[Data] = []
        text = b"*%d\r\n" % len(arguments)
        for argument in arguments:
            data = argument if isinstance(argument, bytes | bytearray | memoryview) else str(argument).encode()
            text += b"$%d\r\n" % len(data)
            if len(data) >= _LONG:
                pieces += (text, data)
                text = b""
            else:
                text += data
            text += b"\r\n"
        return [*pieces, text]


class Room(threading.local):
    """Where the values go that the current thread waits for. free: memory that is left; it gets smaller with each value."""

    free: memoryview = memoryview(b"")


class ReplyReader:
    """What the client package takes as `parser_class`. Speaks RESP2; values are views into `room`, or empty bytes if they do not fit."""

    def __init__(self, socket_read_size: int, room: Room) -> None:
        self._room = room
        self._bytes = bytearray(socket_read_size)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0  # what is in the buffer and not yet taken
        self._socket: socket.socket | None = None
        self._timeout = 0.0
        self._deadline = 0.0

    def on_connect(self, connection: Any) -> None:
        self._socket = connection._sock
        self._timeout = float(connection.socket_timeout)
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float) -> bool:
        """Whether something is there within so many seconds. Raises LostConnection at the end of the stream."""
        if self._start < self._end:
            return True
        if self._socket is None:
            raise LostConnection("the connection is closed")
        self._socket.settimeout(timeout)
        try:
            self._fill()
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            self._socket.settimeout(self._timeout)
        return True

    def read_response(self, disable_decoding: bool = False) -> Any:
        """The next answer: text as bytes, a number, a value, None, a list of these, or a `Refusal`, which is returned."""
        self._deadline = time.monotonic() + self._timeout
        line = self._line()
        if line[:1] != b"*":
            return self._item(line)
        count = self._number(line)
        if count > _MOST_ITEMS:
            raise InvalidResponse(f"an answer of {count} items")
        return None if count < 0 else [self._item(self._line()) for _ in range(count)]

    def _item(self, line: bytes) -> Any:
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._value(self._number(line))
        if kind == b":":
            return self._number(line)
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refusal(rest.decode("utf-8", "replace"))
        raise InvalidResponse(f"an answer that begins with {line[:32]!r}")

    def _number(self, line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError:
            raise InvalidResponse(f"an answer that begins with {line[:32]!r}") from None

    def _line(self) -> bytes:
        while (end := self._bytes.find(b"\r\n", self._start, self._end)) < 0:
            have = self._end - self._start
            if have == len(self._bytes):
                raise InvalidResponse(f"an answer that begins with a line of more than {have} bytes")
            self._buffer[:have] = self._bytes[self._start : self._end]
            self._start, self._end = 0, have
            self._await()
            self._fill()
        line = bytes(self._buffer[self._start : end])
        self._start = end + 2
        return line

    def _value(self, length: int) -> memoryview | bytes | None:
        if length < 0:
            return None
        if length > len(self._room.free):
            self._skip(length + 2)
            return b""
        value, self._room.free = self._room.free[:length], self._room.free[length:]
        have = min(length, self._end - self._start)
        value[:have] = self._buffer[self._start : self._start + have]
        self._start += have
        while have < length:
            self._await()
            have += self._receive(value[have:])
        self._skip(2)
        return value

    def _skip(self, count: int) -> None:
        while True:
            step = min(count, self._end - self._start)
            self._start += step
            count -= step
            if not count:
                return
            self._await()
            self._fill()

    def _await(self) -> None:
        """Raises TimeoutError after the deadline. The receive that follows has the socket's own timeout once more."""
        if time.monotonic() >= self._deadline:
            raise TimeoutError(f"an answer took more than {self._timeout:g} s")

    def _fill(self) -> None:
        """Receive more into the buffer, behind what is in it."""
        if self._start == self._end:
            self._start = self._end = 0
        self._end += self._receive(self._buffer[self._end :])

    def _receive(self, into: memoryview) -> int:
        if self._socket is None:
            raise LostConnection("the connection is closed")
        count = self._socket.recv_into(into)
        if not count:
            raise LostConnection("the server has closed the connection")
        return count
