"""GGUF files made by hand, byte by byte, so that every field can also be wrong; ways to damage a file; a progress to look at."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest

FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    30: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
}
EXTREMES = [0, 1, 7, 8, 9, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1]


class GGUFBytes:
    """The pieces of a GGUF file."""

    @staticmethod
    def header(tensors: int, keys: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
        return magic + struct.pack("<IQQ", version, tensors, keys)

    @staticmethod
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def entry(self, key: str, kind: int, payload: bytes) -> bytes:
        return self.text(key.encode()) + struct.pack("<I", kind) + payload

    def value(self, kind: int, value: Any) -> bytes:
        if kind == STRING:
            return self.text(value.encode())
        if kind == ARRAY:
            element, values = value
            return struct.pack("<IQ", element, len(values)) + b"".join(self.value(element, v) for v in values)
        return struct.pack("<" + FORMS[kind], value)

    def tensor(self, name: str, dims: Sequence[int], code: int, offset: int) -> bytes:
        return self.text(name.encode()) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)

    def file(
        self, values: Sequence[tuple[str, int, Any]], tensors: Sequence[tuple[str, Sequence[int], int, bytes]] = (), alignment: int = 32
    ) -> bytes:
        """A sound file: (key, kind, value) entries and (name, dims, type code, data) tensors."""
        head = self.header(len(tensors), len(values))
        head += b"".join(self.entry(key, kind, self.value(kind, value)) for key, kind, value in values)
        data = b""
        for name, dims, code, raw in tensors:
            data += b"\0" * (-len(data) % alignment)
            head += self.tensor(name, dims, code, len(data))
            data += raw
        return head + b"\0" * (-len(head) % alignment) + data if tensors else head

    def everything(self) -> bytes:
        """A small file with all value kinds, arrays of all of them, and all supported tensor types."""
        scalars = {0: 200, 1: -5, 2: 60000, 3: -30000, 4: 4 * 10**9, 5: -(10**9), 6: 0.5, 7: True, 10: 2**63 + 1, 11: -(2**62), 12: 0.1}
        values: list[tuple[str, int, Any]] = [(f"scalar.{kind}", kind, value) for kind, value in scalars.items()]
        values += [(f"array.{kind}", ARRAY, (kind, [value] * 3)) for kind, value in scalars.items()]
        values += [("text", STRING, "grüße"), ("texts", ARRAY, (STRING, ["a", "", "日本", "x" * 40])), ("empty", ARRAY, (4, []))]
        rng = random.Random(1)
        tensors: list[tuple[str, Sequence[int], int, bytes]] = []
        for code, (block, size) in BLOCKS.items():
            cols = max(block, 4)
            tensors.append((f"blk.{code}.weight", (cols, 3), code, rng.randbytes(3 * cols // block * size)))
        tensors.append(("norm", (5,), 0, rng.randbytes(20)))
        tensors.append(("experts", (32, 2, 3), 8, rng.randbytes(6 * 34)))
        return self.file(values, tensors)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One to three random damages: bits, bytes, integers at any place, cuts, deletions, repetitions, insertions."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) or 1)
        match rng.randrange(8):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.randrange(256)
            case 2:
                out[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case 3:
                out[at : at + 4] = struct.pack("<I", rng.choice(EXTREMES) & 0xFFFFFFFF)
            case 4:
                del out[at:]
            case 5:
                del out[at : at + rng.randint(1, 64)]
            case 6:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case _:
                out[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(out)


class Said:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.done: list[int] = []

    def begin(self, label: str, total: int) -> None:
        self.messages.append(label)

    def update(self, done: int) -> None:
        self.done.append(done)

    def end(self) -> None: ...

    def say(self, message: str) -> None:
        self.messages.append(message)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture(scope="session")
def gguf_bytes() -> GGUFBytes:
    return GGUFBytes()


@pytest.fixture(scope="session")
def damage() -> Any:
    """`mutate(rng, bytes) -> bytes`"""
    return mutate
