"""Blocks to store: keys, labels and entries that are theirs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from tokenmill.transfer.store.entry import NO_PARENT, Label, Scope, pack

SCOPE = Scope.of("model", "tenant")


def key(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16).digest()


def keys(count: int) -> list[bytes]:
    """Of one text's blocks."""
    return [key(number) for number in range(count)]


def label(number: int, scope: Scope = SCOPE) -> Label:
    return Label(scope, key(number), key(number - 1) if number else NO_PARENT)


def payload(number: int, size: int = 1000) -> bytes:
    return random.Random(number).randbytes(size)


def entry(number: int, size: int = 1000) -> bytes:
    return pack(label(number), payload(number, size))


def entries(count: int, size: int = 1000) -> list[tuple[bytes, bytes]]:
    return [(key(number), entry(number, size)) for number in range(count)]


def room(size: int = 1 << 20) -> memoryview:
    return memoryview(bytearray(size))


def same(got: Sequence[memoryview], put: Sequence[tuple[bytes, bytes]]) -> bool:
    return [bytes(view) for view in got] == [data for _, data in put]
