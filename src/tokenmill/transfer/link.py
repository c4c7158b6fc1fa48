"""The reading side of connectors that reach doors by a socket."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tokenmill.kernels.frames import Checksum, Frames
from tokenmill.kernels.ops import Int32s
from tokenmill.transfer.connector import Lost, Peer, Refused
from tokenmill.transfer.messages import ANSWERS, Read, Refusal
from tokenmill.transfer.stream import Garbled, Stream


class Receipt(Protocol):
    """What connectors differ in."""

    def take(self, stream: Stream, theirs: Sequence[Int32s], mine: Frames, check: Checksum) -> None:
        """Get what the door delivers (door.py), now that it has granted the frames. Raises `Refused`, `Lost`, OSError."""
        ...

    def close(self) -> None: ...


class SocketLink:
    """A link (connector.py) with a socket."""

    def __init__(self, address: str, stream: Stream, peer: Peer, receipt: Receipt) -> None:
        self._address = address
        self._stream = stream
        self._receipt = receipt
        self.peer = peer

    def fetch(self, nonce: bytes, theirs: Sequence[Int32s], mine: Frames, check: Checksum) -> None:
        with losses(self._address):
            self._stream.send(Read.of(nonce, theirs))
            answer = self._stream.receive(ANSWERS)
            if isinstance(answer, Refusal):
                raise Refused(answer.reason, answer.detail)
            self._receipt.take(self._stream, theirs, mine, check)

    def ended(self) -> bool:
        return not self._stream.quiet()

    def cut(self) -> None:
        self._stream.cut()

    def close(self) -> None:
        self._receipt.close()
        self._stream.close()


@contextlib.contextmanager
def opening(address: str, reach: Callable[[], Stream]) -> Iterator[Stream]:
    """A new stream, which is closed again if no link comes of it."""
    with losses(address):
        stream = reach()
        try:
            yield stream
        except BaseException:
            stream.close()
            raise


@contextlib.contextmanager
def losses(address: str) -> Iterator[None]:
    """What goes wrong on a stream to `address`, as `Lost`."""
    try:
        yield
    except TimeoutError as error:
        raise Lost("silent", f"{address} says nothing: {error}") from None
    except Garbled as error:
        raise Lost("garbled", f"{address} does not speak the protocol: {error}") from None
    except OSError as error:
        raise Lost("ended", f"{address} is gone: {error}") from None
