"""What doors and readers say to each other, apart from frames.

Door: `Challenge`. Reader: `Hello`. Door: `Welcome`, or `Refusal` and the end. Then as often as the reader likes — reader: `Read`; door:
`Granted` and what its connector delivers, or `Refusal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.proof import Challenge, Fresh, Opening
from tokenmill.kernels.ops import Int32s
from tokenmill.transfer.connector import NONCE_BYTES, Reason, Refused

VERSION = 1
"""Of the protocol. It stands in the first message of each side, and all versions to come can read that."""

Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Hello(Opening, frozen=True, kw_only=True):
    """proof: of all other fields (core/proof.py)."""

    fresh: Fresh
    fingerprint: str
    slots: tuple[int, ...]
    piece_bytes: int
    proof: bytes = b""


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """proof: of all other fields (core/proof.py)."""

    boot: str
    fingerprint: str
    slots: tuple[int, ...]
    slot_stride: int
    piece_bytes: int
    n_frames: int
    proof: bytes = b""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: Reason
    detail: str


class Read(msgspec.Struct, frozen=True):
    """frames: of each group, int32, little-endian."""

    nonce: Nonce
    frames: tuple[bytes, ...]

    @classmethod
    def of(cls, nonce: bytes, frames: Sequence[Int32s]) -> Read:
        return cls(nonce, tuple(np.asarray(numbers).astype("<i4").tobytes() for numbers in frames))

    def numbers(self) -> list[npt.NDArray[np.int32]]:
        """Raises `Refused` if they are none."""
        if any(len(part) % 4 for part in self.frames):
            raise Refused("frames", "frames are named by int32 numbers")
        return [np.frombuffer(part, "<i4").astype(np.int32) for part in self.frames]


class Granted(msgspec.Struct, frozen=True, tag=True):
    pass


Greeting: TypeAlias = Welcome | Refusal
Answer: TypeAlias = Granted | Refusal

OPENINGS = msgspec.msgpack.Decoder(Opening)
CHALLENGES = msgspec.msgpack.Decoder(Challenge)
HELLOS = msgspec.msgpack.Decoder(Hello)
READS = msgspec.msgpack.Decoder(Read)
REFUSALS = msgspec.msgpack.Decoder(Refusal)
GREETINGS: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
