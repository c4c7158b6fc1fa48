"""The reading side of connectors that reach doors by a socket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tokenmill.kernels.ops import Int32s
from tokenmill.transfer.connector import Lost, Refused
from tokenmill.transfer.messages import ANSWERS, Read, Refusal
from tokenmill.transfer.stream import Garbled, Stream


@contextlib.contextmanager
def losses(peer: str) -> Iterator[None]:
    """What goes wrong on a stream, as `Lost`. peer: its address."""
    try:
        yield
    except TimeoutError as error:
        raise Lost("silent", f"{peer} says nothing: {error}") from None
    except Garbled as error:
        raise Lost("garbled", f"{peer} does not speak the protocol: {error}") from None
    except OSError as error:
        raise Lost("ended", f"{peer} is gone: {error}") from None


def ask(stream: Stream, nonce: bytes, theirs: Sequence[Int32s]) -> None:
    """Ask a door for frames; returns when they are granted. Raises `Refused`, OSError."""
    stream.send(Read.of(nonce, theirs))
    answer = stream.receive(ANSWERS)
    if isinstance(answer, Refusal):
        raise Refused(answer.reason, answer.detail)
