"""Connector `tcp`, for workers on different hosts: the door gathers frames and sends them, the reader scatters what comes.

Both sides must know one secret (handshake.py). Without TLS frames travel in the clear, and who can change packets can change them; the
checksum, which comes another way, tells.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from tokenmill.kernels.frames import BLOCK, Checksum, Frames
from tokenmill.kernels.ops import Int32s
from tokenmill.transfer import network
from tokenmill.transfer.connector import Connect, Door, Link, Options, Refused, Side
from tokenmill.transfer.door import SocketDoor
from tokenmill.transfer.grants import Grant
from tokenmill.transfer.handshake import introduce
from tokenmill.transfer.link import SocketLink, opening
from tokenmill.transfer.listener import Session
from tokenmill.transfer.messages import REFUSALS
from tokenmill.transfer.stream import Stream

_LENGTH = struct.Struct(">I")
"""Before each block of frames. 0: none comes any more, but a `Refusal`."""


def open_door(side: Side, options: Options) -> Door:
    """Raises `ConfigError` if there is no secret, no address for others, or no such port."""
    secret = options.require_secret()
    sock, address = network.listen_at(options)
    return SocketDoor(side, _Delivery(options), sock, f"tcp:{address}", secret, options.timeout)


def connector(side: Side, options: Options) -> Connect:
    def connect(address: str) -> Link:
        secret = network.secret_of_reader(options)
        with opening(f"tcp:{address}", lambda: network.reach(address, options)) as stream:
            return SocketLink(f"tcp:{address}", stream, introduce(stream, side, secret), _Receipt())

    return connect


class _Delivery:
    """Blocks, each with its length before it."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def accept(self, session: Session) -> None:
        network.accept(session, self._options)

    def open(self, stream: Stream) -> None:
        pass

    def deliver(self, stream: Stream, frames: Frames, grant: Grant) -> None:
        block = np.empty(_LENGTH.size + min(BLOCK, frames.nbytes), np.uint8)
        data = block[_LENGTH.size :]
        for start in range(0, frames.nbytes, BLOCK):
            count = min(BLOCK, frames.nbytes - start)
            frames.gather(data[:count], start)
            if grant.revoked:  # what was gathered before may still be whole, but nobody vouches for it
                stream.send_bytes(_LENGTH.pack(0))
                raise Refused("nonce", "the grant was revoked while its frames were read")
            _LENGTH.pack_into(block.data, 0, count)
            stream.send_bytes(block.data[: _LENGTH.size + count])


class _Receipt:
    def take(self, stream: Stream, theirs: Sequence[Int32s], mine: Frames, check: Checksum) -> None:
        block = np.empty(min(BLOCK, mine.nbytes), np.uint8)
        at = 0
        while at < mine.nbytes:
            count = stream.receive_length(min(BLOCK, mine.nbytes - at))
            if count == 0:
                refusal = stream.receive(REFUSALS)
                raise Refused(refusal.reason, refusal.detail)
            stream.receive_into(block.data[:count])
            mine.scatter(block[:count], at)
            at += count
            check.advance(at)

    def close(self) -> None:
        pass
