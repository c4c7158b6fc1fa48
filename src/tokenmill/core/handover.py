"""What gateway, prefill worker and decode worker say to each other about a hand-over, and the ticket (docs/handover.md).

All of it goes through the gateway. `Ready`, `Taken` and `Refused` are for the other worker; the gateway passes them on as they are.
Each attempt at a request has an epoch, told in `Generate`, that rises with every attempt; what is said about a hand-over names it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, TypeAlias

import msgspec

from tokenmill.core.messages import FromEngine, Generate, ToEngine
from tokenmill.core.types import FRAME

NONCE_BYTES = 16

WAITED_TOO_LONG = "waited_too_long"
"""The code of the `Failed` by which a decode worker gives up a sequence whose frames do not come."""

Refusal: TypeAlias = Literal[
    # what is wrong with a ticket
    "nonce",
    "request",
    "epoch",
    "decode_boot",
    "prefill_boot",
    "fingerprint",
    "tenant",
    "chunk",
    "range",
    "frames",
    "tokens",
    "expired",
    # how a read ended, as connectors say it
    "refused",
    "lost",
    "corrupt",
    # or why it was not begun
    "displaced",
]
"""Why a decode worker did not take a chunk: nonce: it has no reservation of that name; request to prefill_boot: it is for another one;
fingerprint, tenant, tokens: the frames would hold something else; chunk, range, frames: they are not what comes next; expired: it is too
old; refused, lost, corrupt: the frames could not be read, or were not those that the ticket promised; displaced: the decode worker's own
frames for them have been given to sequences that run."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Where the frames of one chunk of a prompt can be read, and everything by which the reader finds out that they are the right ones.

    nonce: of the reservation that they are for. tenant: the `cache_salt`. token_hash: of all tokens up to `stop` (`token_hash`).
    address: of the prefill worker's connector. chunk: number of the chunk, from 0. start, stop: its positions, whole frames. frames: of
    each KV group, in order (`frames_of_chunk` says how many). checksum: of those frames' bytes. last: no chunk comes after it.
    expiry: seconds from its arrival on within which reading has to begin.
    """

    nonce: bytes
    request_id: str
    epoch: int
    prefill_boot: str
    decode_boot: str
    fingerprint: str
    tenant: str
    token_hash: bytes
    address: str
    chunk: int
    start: int
    stop: int
    frames: tuple[tuple[int, ...], ...]
    checksum: bytes
    last: bool
    expiry: float


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """To the decode worker: take frames for a sequence and let it wait for its prompt's. expiry: seconds without news after which
    the worker gives them up."""

    generate: Generate
    expiry: float


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """It waits. nonce: random, of this reservation alone. have: positions that the worker's prefix tree has already. A request that it
    does not take is answered with `Failed`."""

    request_id: str
    epoch: int
    nonce: bytes
    have: int


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """To the prefill worker: compute the prompt, draw one token, and keep the frames from position `start` on for the reservation
    `nonce` of the worker `decode_boot`. expiry: seconds for which computed frames are kept without one of them being taken."""

    generate: Generate
    nonce: bytes
    decode_boot: str
    start: int
    expiry: float


class Ready(msgspec.Struct, frozen=True, tag="chunk_ready"):
    """From the prefill worker to the decode worker: a chunk can be read. All of a prompt's are sent before the token is."""

    ticket: Ticket


class Taken(msgspec.Struct, frozen=True, tag="chunk_taken"):
    """From the decode worker to the prefill worker: this chunk and all before it have been copied. nbytes, seconds: of the copy of this
    one, for whoever decides by what copies take."""

    request_id: str
    epoch: int
    nonce: bytes
    chunk: int
    nbytes: int = 0
    seconds: float = 0.0


class Refused(msgspec.Struct, frozen=True, tag="chunk_refused"):
    """From the decode worker to the prefill worker: no more chunks will be read, so none need be kept. The prompt's token is still
    wanted; what is missing of the prompt is computed by the decode worker."""

    request_id: str
    epoch: int
    nonce: bytes
    reason: Refusal


class Start(msgspec.Struct, frozen=True, tag="start"):
    """To the decode worker: no ticket will come any more. When the chunks that it knows of have been read, or have failed to be, the
    sequence runs. tokens: drawn by the prefill worker; none if it did not get that far."""

    request_id: str
    epoch: int
    tokens: tuple[int, ...] = ()


class Release(msgspec.Struct, frozen=True, tag="release"):
    """To either worker: the attempt is over here. Whatever there is of it, reservation, lease or running sequence, ends and is told
    nobody."""

    request_id: str
    epoch: int


class Cached(msgspec.Struct, frozen=True, tag="cached"):
    """From a worker to the gateway, which sends prompts to where they begin: what its prefix cache has, and has no longer.

    evicted: names of blocks (core/blocks.py), in any order. chains: of sequences that are over, names from the first block on; these were
    there after `evicted` were gone."""

    chains: list[list[bytes]]
    evicted: list[bytes]


ToWorker = ToEngine | Reserve | Prefill | Ready | Taken | Refused | Start | Release
FromWorker = FromEngine | Reserved | Ready | Taken | Refused | Cached


def tokens_of(generate: Generate) -> list[int]:
    """All tokens of a request of one choice: its prompt, and what has been put out already."""
    return generate.prompt + generate.output.get(0, [])


def full_positions(tokens: int) -> int:
    """Positions of that many tokens that lie in full frames; no others are handed over."""
    return tokens // FRAME * FRAME


def frames_of_chunk(start: int, stop: int, window: int | None) -> int:
    """How many frames of a KV group belong to the chunk [start, stop).

    window: of the group, in positions; None where all are kept. A group with a window brings only what the row at `stop` sees, so that
    after each chunk the decode worker has what it needs to go on from there.
    """
    first = start if window is None else max(start, full_positions(stop + 1 - window))
    return (stop - first) // FRAME


def token_hash(tokens: Sequence[int]) -> bytes:
    """16 bytes that stand for these tokens, which nobody can find others for (BLAKE2b)."""
    return blake2b(array("i", tokens).tobytes(), digest_size=16, person=b"tokenmill ticket").digest()
