"""GGUF weights taken apart into the integers and scales of docs/numerics.md, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Parts = tuple[U8, F32, F32 | None]
"""q [n, blocks, size], d [n, blocks], m [n, blocks] of n file blocks."""

_LOW, _FOUR = np.uint8(15), np.uint8(4)


@dataclass(frozen=True)
class Blocks:
    """`w = d * (q - zero) + m`: q uint8 [rows, blocks, size], d float32 [rows, blocks], m like d or None."""

    q: U8
    zero: int
    d: F32
    m: F32 | None


@dataclass(frozen=True)
class RefWeight:
    """A weight [rows, cols]; `content` is float32 [rows, cols] for the types that store floats, `Blocks` for the others."""

    rows: int
    cols: int
    content: F32 | Blocks

    @classmethod
    def from_bytes(cls, kind: str, rows: int, cols: int, data: U8) -> RefWeight:
        """Unpack the bytes of a GGUF tensor: `kind` is its type's name, `data` uint8 1-D, cols a multiple of the type's block."""
        if kind in _FLOATS:
            return cls(rows, cols, _FLOATS[kind](data).reshape(rows, cols))
        size, zero, unpack = _BLOCKS[kind]
        q, d, m = unpack(data.reshape(-1, size))
        by_row = (rows, -1)
        blocks = Blocks(q.reshape(rows, -1, q.shape[-1]), zero, d.reshape(by_row), None if m is None else m.reshape(by_row))
        assert blocks.q.size == rows * cols, f"{kind} bytes hold {blocks.q.size} weights, not {rows} x {cols}"
        return cls(rows, cols, blocks)

    def take(self, rows: npt.NDArray[np.int32]) -> F32:
        """The dequantised rows, float32 [len(rows), cols]."""
        w = self.content
        if not isinstance(w, Blocks):
            return w[rows]
        q = w.q[rows].astype(np.float32) - np.float32(w.zero)
        # d * (q - zero) is exact in float32 for every type: this is the fused multiply-add as well
        values = w.d[rows, :, None] * q + (np.float32(0) if w.m is None else w.m[rows, :, None])
        return values.reshape(len(rows), self.cols)

    def dequantize(self) -> F32:
        """All weights, float32 [rows, cols]."""
        return self.take(np.arange(self.rows, dtype=np.int32))


def _f16(raw: U8) -> F32:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _bf16(raw: U8) -> F32:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _nibbles(raw: U8) -> U8:
    """[n, k] bytes to [n, 2, k] values: all low halves, then all high halves."""
    return np.stack((raw & _LOW, raw >> _FOUR), axis=1)


def _fifth_bits(raw: U8) -> U8:
    """4 bytes to 32 values of 0 or 16 in [n, 2, 16]."""
    return np.unpackbits(raw, axis=1, bitorder="little").reshape(-1, 2, 16) << _FOUR


def _block(q: U8) -> U8:
    return q.reshape(len(q), 1, 32)


def _q4_0(raw: U8) -> Parts:
    return _block(_nibbles(raw[:, 2:])), _f16(raw[:, :2]), None


def _q4_1(raw: U8) -> Parts:
    return _block(_nibbles(raw[:, 4:])), _f16(raw[:, :2]), _f16(raw[:, 2:4])


def _q5_0(raw: U8) -> Parts:
    return _block(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])), _f16(raw[:, :2]), None


def _q5_1(raw: U8) -> Parts:
    return _block(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])), _f16(raw[:, :2]), _f16(raw[:, 2:4])


def _q8_0(raw: U8) -> Parts:
    return _block(raw[:, 2:] ^ np.uint8(128)), _f16(raw[:, :2]), None


def _k_scales(raw: U8) -> tuple[F32, F32]:
    """The head of a Q4_K or Q5_K block (d, dmin, 12 bytes of 6-bit scales and minima) to d and m, [n, 8] each."""
    a, b, c = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = np.concatenate((a & 63, (c & 15) | (a >> 6 << 4)), axis=1)
    minimum = np.concatenate((b & 63, (c >> 4) | (b >> 6 << 4)), axis=1)
    return _f16(raw[:, :2]) * scale, -(_f16(raw[:, 2:4]) * minimum)


def _q4_k(raw: U8) -> Parts:
    d, m = _k_scales(raw)
    return _nibbles(raw[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32), d, m


def _q5_k(raw: U8) -> Parts:
    d, m = _k_scales(raw)
    high = (raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _nibbles(raw[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32) | high << _FOUR, d, m


def _q6_k(raw: U8) -> Parts:
    low = _nibbles(raw[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)) & np.uint8(3)
    scale = np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return (low | high << _FOUR).reshape(-1, 16, 16), _f16(raw[:, 208:210]) * scale, None


_FLOATS: dict[str, Callable[[U8], F32]] = {"F32": lambda raw: raw.view(np.float32), "F16": _f16, "BF16": _bf16}

_BLOCKS: dict[str, tuple[int, int, Callable[[U8], Parts]]] = {
    "Q4_0": (18, 8, _q4_0),
    "Q4_1": (20, 0, _q4_1),
    "Q5_0": (22, 16, _q5_0),
    "Q5_1": (24, 0, _q5_1),
    "Q8_0": (34, 128, _q8_0),
    "Q4_K": (144, 0, _q4_k),
    "Q5_K": (176, 0, _q5_k),
    "Q6_K": (210, 32, _q6_k),
}
"""Bytes of a file block, zero, how to unpack it."""

TYPES = (*_FLOATS, *_BLOCKS)
