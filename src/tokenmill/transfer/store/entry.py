"""What is stored: a block's bytes in an envelope that says whose they are, and whether they are all there.

An entry is 96 bytes of head and then the payload. All numbers are little-endian.

| at | bytes | |
|---|---|---|
| 0 | 4 | `TMKV` |
| 4 | 2 | version of this format |
| 6 | 2 | zero |
| 8 | 8 | bytes of payload |
| 16 | 16 | digest of the fingerprint: model file, KV format, kernels |
| 32 | 16 | key of the block |
| 48 | 16 | key of the block before it; zero for the first |
| 64 | 16 | digest of the tenant's salt; zero where there is none |
| 80 | 16 | XXH3-128 of the 80 bytes before it and the payload |

An entry that is not what was asked for is no error: it is ignored for a `Reason`, which is counted, and the block is computed. The
checksum finds damage, not malice: who may write into the store is believed.
"""

from __future__ import annotations

import enum
import struct
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import xxhash

Data: TypeAlias = bytes | bytearray | memoryview
"""One dimension, items of one byte."""

KEY_BYTES = 16
NO_PARENT = bytes(KEY_BYTES)
MAGIC = b"TMKV"
VERSION = 1

_FIELDS = struct.Struct("<4sHHQ16s16s16s16s")
_DIGEST_BYTES = 16
HEAD_BYTES = _FIELDS.size + _DIGEST_BYTES


class Reason(enum.StrEnum):
    """Why an entry is not used."""

    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    NO_ENTRY = "no_entry"
    """Something else lies under the key."""
    VERSION = "version"
    FINGERPRINT = "fingerprint"
    TENANT = "tenant"
    KEY = "key"
    """It is another block's entry."""
    PARENT = "parent"
    SIZE = "size"
    """It is the block, but its payload is not as long as such blocks can be."""


class Scope(NamedTuple):
    """Whose blocks: digests of 16 bytes of the fingerprint and of the tenant's salt, zero without a salt."""

    fingerprint: bytes
    tenant: bytes

    @classmethod
    def of(cls, fingerprint: str, salt: str = "") -> Scope:
        return cls(_digest(fingerprint), _digest(salt) if salt else bytes(_DIGEST_BYTES))


class Label(NamedTuple):
    """What a block is called. parent: the key of the block before it, `NO_PARENT` for a text's first."""

    scope: Scope
    key: bytes
    parent: bytes = NO_PARENT


def pack(label: Label, payload: Data) -> bytes:
    """The entry of a block, HEAD_BYTES longer than its payload."""
    scope, key, parent = label
    assert len(key) == len(parent) == KEY_BYTES, f"keys of {len(key)} and {len(parent)} bytes"
    fields = _FIELDS.pack(MAGIC, VERSION, 0, len(payload), scope.fingerprint, key, parent, scope.tenant)
    return b"".join((fields, _checksum(fields, payload), payload))


def unpack(label: Label, entry: Data) -> memoryview | Reason:
    """The payload, as a view into `entry`, or why it is not the block of that label."""
    damage = _damage(entry)
    if damage is not None:
        return damage
    _, _, _, _, fingerprint, key, parent, tenant = _FIELDS.unpack_from(entry)
    scope = label.scope
    for reason, is_it in (
        (Reason.FINGERPRINT, fingerprint == scope.fingerprint),
        (Reason.TENANT, tenant == scope.tenant),
        (Reason.KEY, key == label.key),
        (Reason.PARENT, parent == label.parent),
    ):
        if not is_it:
            return reason
    return memoryview(entry)[HEAD_BYTES:]


def flaw(key: bytes, entry: Data) -> Reason | None:
    """What is wrong with an entry, as far as it shows to someone who knows only its key."""
    damage = _damage(entry)
    if damage is None and bytes(entry[32:48]) != key:
        return Reason.KEY
    return damage


def _damage(entry: Data) -> Reason | None:
    if len(entry) < HEAD_BYTES:
        return Reason.TRUNCATED
    magic, version, _, length, *_ = _FIELDS.unpack_from(entry)
    if magic != MAGIC:
        return Reason.NO_ENTRY
    if version != VERSION:
        return Reason.VERSION
    if len(entry) - HEAD_BYTES < length:
        return Reason.TRUNCATED
    view = memoryview(entry)
    fields, checksum, payload = view[: _FIELDS.size], view[_FIELDS.size : HEAD_BYTES], view[HEAD_BYTES:]
    # It also finds what is longer than it says: that is not what the checksum was taken of.
    if checksum != _checksum(fields, payload):
        return Reason.CORRUPT
    return None


def _checksum(fields: Data, payload: Data) -> bytes:
    checksum = xxhash.xxh3_128(fields)
    checksum.update(payload)
    return checksum.digest()


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=b"tokenmill store").digest()
