"""Who is on the other end: version, secret (core/proof.py), fingerprint and the format of frames, before the first read. The reader
proves first."""

from __future__ import annotations

import msgspec

from tokenmill.core.proof import Challenge, draw, is_proven, prove
from tokenmill.kernels.frames import Geometry
from tokenmill.transfer.connector import Peer, Refused, Side
from tokenmill.transfer.messages import CHALLENGES, GREETINGS, HELLOS, OPENINGS, VERSION, Hello, Refusal, Welcome
from tokenmill.transfer.stream import MAX_OPENING, Stream, decode


def receive_reader(stream: Stream, side: Side, secret: bytes) -> None:
    """The door's part. Raises `Refused`, which the reader has been told then, and OSError."""
    challenge = Challenge(version=VERSION, fresh=draw())
    stream.send(challenge)
    body = stream.receive_message(MAX_OPENING)
    try:
        _require_version(decode(OPENINGS, body).version, "reader")
        hello = decode(HELLOS, body)
        if not is_proven(secret, "reader", challenge.fresh, hello):
            raise Refused("secret", "the reader does not know this door's secret: give all workers the same one")
        _require_same(side, "reader", hello.fingerprint, hello.slots, hello.piece_bytes)
    except Refused as refused:
        stream.send(Refusal(refused.reason, refused.detail))
        raise
    g = side.memory.geometry
    welcome = Welcome(
        boot=side.boot,
        fingerprint=side.fingerprint,
        slots=g.slots,
        slot_stride=g.slot_stride,
        piece_bytes=g.piece_bytes,
        n_frames=g.n_frames,
    )
    stream.send(msgspec.structs.replace(welcome, proof=prove(secret, "door", hello.fresh, welcome)))


def introduce(stream: Stream, side: Side, secret: bytes) -> Peer:
    """The reader's part; returns who the door's worker is. Raises `Refused`, `Lost` and OSError."""
    body = stream.receive_message(MAX_OPENING)
    _require_version(decode(OPENINGS, body).version, "door")
    challenge = decode(CHALLENGES, body)
    g = side.memory.geometry
    fresh = draw()
    hello = Hello(version=VERSION, fresh=fresh, fingerprint=side.fingerprint, slots=g.slots, piece_bytes=g.piece_bytes)
    stream.send(msgspec.structs.replace(hello, proof=prove(secret, "reader", challenge.fresh, hello)))
    welcome = stream.receive(GREETINGS, MAX_OPENING)
    if isinstance(welcome, Refusal):
        raise Refused(welcome.reason, welcome.detail)
    if not is_proven(secret, "door", fresh, welcome):
        raise Refused("secret", "the door does not know this reader's secret: give all workers the same one")
    _require_same(side, "door", welcome.fingerprint, welcome.slots, welcome.piece_bytes)
    geometry = Geometry(welcome.slots, welcome.slot_stride, welcome.piece_bytes, welcome.n_frames)
    return Peer(welcome.boot, welcome.fingerprint, geometry)


def _require_version(version: int, who: str) -> None:
    if version != VERSION:
        told = f"the {who} speaks version {version} of the protocol, but this worker {VERSION}"
        raise Refused("version", f"{told}: install one release on all")


def _require_same(side: Side, who: str, fingerprint: str, slots: tuple[int, ...], piece_bytes: int) -> None:
    g = side.memory.geometry
    if fingerprint != side.fingerprint:
        raise Refused(
            "fingerprint",
            f"the {who} has fingerprint {fingerprint[:16]!r}…, but this worker {side.fingerprint[:16]!r}…: model file, KV format, "
            "calibration, kernel variant and numerics must be the same",
        )
    if (slots, piece_bytes) != (g.slots, g.piece_bytes):
        raise Refused(
            "geometry",
            f"the {who} has groups of {slots} slots and {piece_bytes} bytes in a head's frame, "
            f"but this worker {g.slots} and {g.piece_bytes}",
        )
