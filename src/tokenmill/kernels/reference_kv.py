"""Keys, values, queries and weights of attention in every format, as docs/numerics.md has them, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokenmill.core.types import KVType
from tokenmill.kernels.layout import KVFormat
from tokenmill.kernels.reference_ops import F32, I64, LANES, Arithmetic, bf16, sum_lanes

TINY = np.float32(2.0**-100)
_PART = np.float32(1) / np.float32(254)


def bf16_above(x: F32) -> F32:
    """The next bf16 that is not below x."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + np.where(x < 0, 0, 0xFFFF)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@dataclass
class Stored:
    """Keys or values at n positions: numbers, float32 [n, heads, head_dim], and per group of channels what they are multiplied by and what
    is added then, float32 [n, heads, groups]. The numbers of bf16 are themselves."""

    numbers: F32
    scale: F32
    minimum: F32

    def take(self, at: I64, head: int | None = None) -> Stored:
        """Those at the given positions, of all heads or one; nothing (0) where a position is negative."""
        heads = slice(None) if head is None else slice(head, head + 1)
        there = (at >= 0)[:, None, None]
        return Stored(*(np.where(there, x[at, heads], np.float32(0)) for x in (self.numbers, self.scale, self.minimum)))

    def put(self, at: I64, other: Stored, rows: slice, head: int) -> None:
        for mine, its in ((self.numbers, other.numbers), (self.scale, other.scale), (self.minimum, other.minimum)):
            mine[at, head] = its[rows, head]


@dataclass(frozen=True)
class Digits:
    """Two digits of numbers, (high + low / 254) * step; whole numbers [..., n], step [..., groups]."""

    high: F32
    low: F32
    step: F32

    def take(self, rows: I64 | slice) -> Digits:
        return Digits(self.high[rows], self.low[rows], self.step[rows])


@dataclass(frozen=True)
class Rounding:
    """A format for heads of `head_dim` channels, and what comes of it in one kind of arithmetic."""

    format: KVFormat
    head_dim: int
    arithmetic: Arithmetic

    @property
    def starts(self) -> I64:
        """First channels of the groups."""
        return np.arange(0, self.head_dim, self.format.group_size)

    def spread(self, per_group: F32) -> F32:
        """[..., groups] to [..., head_dim]."""
        sizes = np.diff([*self.starts, self.head_dim])
        return np.repeat(per_group, sizes, axis=-1)

    def empty(self, n: int, heads: int) -> Stored:
        """Memory that was never written: NaN, which must not be read."""
        shape = (n, heads, len(self.starts))
        return Stored(np.full((n, heads, self.head_dim), np.nan, np.float32), *np.full((2, *shape), np.nan, np.float32))

    def keys(self, k: F32, factor: F32, zero: F32) -> Stored:
        """k [n, heads, head_dim]; factor and zero [heads, head_dim]."""
        return self._bf16(k) if self.format.key == "bf16" else self._signed((k - zero) / factor, {"int8": 127, "int4": 7}[self.format.key])

    def values(self, v: F32) -> Stored:
        kind: KVType = self.format.value
        if kind != "int4":
            return self._bf16(v) if kind == "bf16" else self._signed(v, 127)
        low = np.minimum.reduceat(v, self.starts, axis=-1)
        minimum = -bf16_above(-low)
        scale, inverse = _scale(np.maximum.reduceat(v, self.starts, axis=-1) - minimum, 15)
        return Stored(np.rint((v - self.spread(minimum)) * self.spread(inverse)), scale, minimum)

    def queries(self, q: F32, factor: F32) -> F32 | Digits:
        """q [n, heads, head_dim], with its scale; factor [heads, head_dim] of the key head that each reads."""
        if self.format.key == "bf16":
            return bf16(q)
        q = q * factor
        top = np.maximum.reduceat(np.abs(q), self.starts, axis=-1)
        return self._digits(q, top, self.spread)

    def scores(self, q: F32 | Digits, k: Stored) -> F32:
        """[rows, heads, positions] of q [rows, heads, head_dim] and k [positions, heads, head_dim]."""
        first = q if isinstance(q, np.ndarray) else q.high
        acc = np.zeros((*first.shape[:2], len(k.numbers)), np.float32)
        keys = np.moveaxis(k.numbers, 0, 1)
        if isinstance(q, np.ndarray):
            for i in range(0, q.shape[2], 2):
                acc = self.arithmetic.dot2(q[..., i, None], q[..., i + 1, None], keys[..., i], keys[..., i + 1], acc)
            return acc
        for g, start in enumerate(self.starts):
            group = slice(start, start + self.format.group_size)
            high, low = (
                np.einsum("rhd,hjd->rhj", x[..., group], keys[..., group], dtype=np.float64).astype(np.float32) for x in (q.high, q.low)
            )
            acc = self.arithmetic.fma(self._join(high, low), k.scale[..., g].T * q.step[..., g, None], acc)
        return acc

    def weigh(self, p: F32, v: Stored) -> F32:
        """[rows, heads, head_dim] of p [rows, heads, positions], 0 where nothing is seen, and v [positions, heads, head_dim]."""
        values = np.moveaxis(v.numbers, 0, 1)
        out = np.zeros((*p.shape[:2], self.head_dim), np.float32)
        if self.format.value == "bf16":
            for j in range(0, p.shape[2], 2):
                out = self.arithmetic.dot2(p[..., j, None], p[..., j + 1, None], values[:, j], values[:, j + 1], out)
            return out
        for g, start in enumerate(self.starts):
            group = slice(start, start + self.format.group_size)
            w = np.where(p == 0, np.float32(0), p * v.scale[..., g].T)
            d = self._digits(w, w.max(axis=-1, keepdims=True), lambda x: x)
            high, low = (np.einsum("rhj,hjd->rhd", x, values[..., group], dtype=np.float64).astype(np.float32) for x in (d.high, d.low))
            lanes = np.zeros((*p.shape[:2], LANES), np.float32)
            if self.format.value == "int4":
                for j in range(0, p.shape[2], LANES):
                    lanes = self.arithmetic.fma(p[..., j : j + LANES], v.minimum[j : j + LANES, :, g].T, lanes)
            out[..., group] = self.arithmetic.fma(self._join(high, low), d.step, sum_lanes(lanes)[..., None])
        return out

    def _bf16(self, x: F32) -> Stored:
        ones = np.ones((*x.shape[:2], len(self.starts)), np.float32)
        return Stored(bf16(x), ones, 0 * ones)

    def _signed(self, x: F32, most: int) -> Stored:
        scale, inverse = _scale(np.maximum.reduceat(np.abs(x), self.starts, axis=-1), most)
        return Stored(np.rint(x * self.spread(inverse)), scale, np.zeros_like(scale))

    def _digits(self, x: F32, top: F32, spread: Callable[[F32], F32]) -> Digits:
        step = top / np.float32(127)
        inverse = np.where(top < TINY, np.float32(0), np.float32(127) / np.where(top < TINY, np.float32(1), top))
        high = np.rint(x * spread(inverse))
        low = np.rint(self.arithmetic.fma(high, -spread(step), x) * spread(inverse * np.float32(254)))
        return Digits(high, low, step)

    def _join(self, high: F32, low: F32) -> F32:
        return self.arithmetic.fma(low, np.full_like(low, _PART), high)


def _scale(span: F32, steps: int) -> tuple[F32, F32]:
    """A scale and its inverse; 0 and 0 for next to nothing."""
    nothing = span < TINY
    scale = np.where(nothing, np.float32(0), bf16_above(span / np.float32(steps)))
    return scale, np.where(nothing, np.float32(0), np.float32(1) / np.where(nothing, np.float32(1), scale))
