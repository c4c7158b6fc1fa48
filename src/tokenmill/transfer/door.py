"""The serving side of connectors whose readers come by a socket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenmill.core.errors import ConfigError
from tokenmill.kernels.frames import Frames
from tokenmill.kernels.ops import Int32s
from tokenmill.transfer.connector import Refused, Side
from tokenmill.transfer.grants import Grant, Grants
from tokenmill.transfer.handshake import receive_reader
from tokenmill.transfer.listener import Listener, Session
from tokenmill.transfer.messages import READS, Granted, Read, Refusal
from tokenmill.transfer.stream import Stream


class Delivery(Protocol):
    """What connectors differ in."""

    def accept(self, session: Session) -> None:
        """Make a new connection ready for messages. Raises OSError if it is none of ours."""
        ...

    def open(self, stream: Stream) -> None:
        """Tell a reader, who has been welcomed, what it needs once."""
        ...

    def deliver(self, stream: Stream, frames: Frames, grant: Grant) -> None:
        """Send what a reader, who has been told `Granted`, needs for this read. Raises `Refused` if the grant has been revoked, in a
        place where the reader expects a refusal."""
        ...


class SocketDoor:
    """A door (connector.py) with a listening socket."""

    def __init__(self, side: Side, delivery: Delivery, sock: socket.socket, address: str, secret: bytes, timeout: float) -> None:
        self._side = side
        self._delivery = delivery
        self._address = address
        self._secret = secret
        self._timeout = timeout
        self._grants = Grants(len(side.memory.geometry.slots))
        self._listener = Listener(sock, self._serve, address.partition(":")[0] + "-door")

    @property
    def address(self) -> str:
        return self._address

    def grant(self, nonce: bytes, frames: Sequence[Int32s]) -> None:
        self._side.memory.frames(frames)  # raises for what is not in the pool
        self._grants.grant(nonce, frames)

    def revoke(self, nonce: bytes) -> None:
        self._grants.revoke(nonce)

    def close(self) -> None:
        self._listener.close()

    def _serve(self, session: Session) -> None:
        """Until the reader leaves, or is none, or says what no reader would: all that is the reader's business."""
        try:
            session.sock.settimeout(self._timeout)
            self._delivery.accept(session)
            stream = Stream(session.sock, self._timeout)
            receive_reader(stream, self._side, self._secret)
            session.known = True
            self._delivery.open(stream)
            while True:
                stream.wait()
                self._answer(stream, stream.receive(READS))
        except (OSError, Refused):
            return

    def _answer(self, stream: Stream, read: Read) -> None:
        try:
            grant = self._grants.find(read.nonce, numbers := read.numbers())
            stream.send(Granted())
            self._delivery.deliver(stream, self._side.memory.frames(numbers), grant)
        except Refused as refused:
            stream.send(Refusal(refused.reason, refused.detail))


def listen(make: Callable[[], socket.socket], where: str) -> socket.socket:
    """A listening socket. Raises `ConfigError` if the system does not give it."""
    try:
        return make()
    except OSError as error:
        raise ConfigError(f"a door cannot be opened at {where}: {error}: choose another address", param="address") from None
