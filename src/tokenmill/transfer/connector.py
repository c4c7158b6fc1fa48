"""What every connector is: a door that a worker opens over its pool, and a link by which another worker reads through it.

A transfer is a one-sided read: "these frames of yours into these frames of mine". The door's worker grants frames under a nonce, and
whoever knows the nonce can read them until it is revoked. How bytes get across is all that connectors differ in.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from tokenmill.core.proof import require_secret
from tokenmill.kernels.frames import Checksum, Frames, Geometry, KVMemory
from tokenmill.kernels.ops import Int32s

NONCE_BYTES = 16

Outcome: TypeAlias = Literal["ok", "refused", "lost", "corrupt"]
Reason: TypeAlias = Literal[
    "",
    # refused
    "address",
    "version",
    "secret",
    "user",
    "fingerprint",
    "geometry",
    "boot",
    "nonce",
    "frames",
    # lost
    "unreachable",
    "ended",
    "silent",
    "garbled",
    # corrupt
    "checksum",
]


@dataclass(frozen=True)
class Status:
    """How a read went.

    ok: the frames are there and their checksum is right. refused: the door's worker or the reader did not want it, and asking again will
    not help. lost: the other worker is gone, hangs, or does not speak the protocol. corrupt: bytes have come, but not those that were
    meant. Unless it is ok the reader's own frames hold anything.
    """

    outcome: Outcome = "ok"
    reason: Reason = ""
    detail: str = ""


class Refused(Exception):
    """A read that one of the two sides does not want."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Lost(Exception):
    """A peer that cannot be reached, or not any more."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Side:
    """A worker as its peers see it. boot: tells this start of its process from all others. fingerprint: of all that decides what a
    frame's bytes are and mean."""

    memory: KVMemory
    boot: str
    fingerprint: str


@dataclass(frozen=True)
class Peer:
    """The other worker, by its own words."""

    boot: str
    fingerprint: str
    geometry: Geometry


@dataclass(frozen=True)
class Options:
    """How doors are opened and peers are reached.

    timeout: seconds without progress after which a peer is lost. socket_path: of `shm`, where its socket lies; None takes a name in the
    abstract namespace. host, port: where `tcp` listens (0: any port); advertise: under which name others reach it, if that is another.
    secret: what all workers that speak by `tcp` share. door_tls, reader_tls: contexts of the two sides; None sends in the clear.
    """

    timeout: float = 10.0
    socket_path: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    secret: bytes = b""
    door_tls: ssl.SSLContext | None = None
    reader_tls: ssl.SSLContext | None = None

    def require_secret(self) -> bytes:
        """Raises `ConfigError` if there is none, or one that can be guessed."""
        return require_secret(self.secret, "connector tcp")


class Guard(Protocol):
    """Between a read and the end of the frames that it writes to. The read is inside the guard while it writes, does so only if it is
    `open`, and can be broken off by `interrupt` from another thread."""

    open: bool
    interrupt: Callable[[], None]

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


class Door(Protocol):
    """The serving side, over one pool. All methods can be called from any thread, and none waits for a peer."""

    @property
    def address(self) -> str:
        """Where readers find it, such as `shm:@name` or `tcp:10.0.0.7:4100`."""
        ...

    def grant(self, nonce: bytes, frames: Sequence[Int32s]) -> None:
        """Let whoever knows `nonce` read `frames` (of each group), beside what it could already."""
        ...

    def revoke(self, nonce: bytes) -> None:
        """End all that was granted under `nonce`, if anything was. A read under way breaks off, or its checksum is wrong."""
        ...

    def close(self) -> None:
        """End all reads, and listen no more."""
        ...


class Link(Protocol):
    """The reading side's connection to one door, for one thread at a time."""

    @property
    def peer(self) -> Peer: ...

    def fetch(self, nonce: bytes, theirs: Sequence[Int32s], mine: Frames, check: Checksum) -> None:
        """Copy the peer's frames into `mine`, which are as many, and take them into `check` as they come. Raises `Refused`, `Lost`."""
        ...

    def ended(self) -> bool:
        """Whether the peer has closed it, or said something unasked."""
        ...

    def cut(self) -> None:
        """Wake whoever waits for the peer, from another thread."""
        ...

    def close(self) -> None: ...


Connect: TypeAlias = Callable[[str], Link]
"""Reach the door at an address, of which the connector's name was taken off. Raises `Refused`, `Lost`."""
