"""The operations of docs/numerics.md but for attention, one by one, in NumPy: slow, exact, and the oracle of every native kernel.

`Arithmetic(fused=True)` gives the numbers of the `avx2` and `avx512` variants, `Arithmetic(fused=False)` those of `portable`.
All arrays are float32 unless said otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.kernels.reference_weights import Blocks, RefWeight

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

BLOCK = 32
LANES = 16
OUTLIER = np.float32(3.5)

_LOG2E = 1.0 / math.log(2.0)
_SILU = np.float32(-_LOG2E)
_GELU = np.float32(-2 * _LOG2E * math.sqrt(2 / math.pi))
_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-8,
    2.75573137070700676789e-6,
    -1.98412698298579493134e-4,
    8.33333333332248946124e-3,
    -1.66666666666666324348e-1,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-9,
    -2.75573143513906633035e-7,
    2.48015872894767294178e-5,
    -1.38888888888741095749e-3,
    4.16666666666666019037e-2,
)


def bf16(x: F32) -> F32:
    """Round to the nearest bf16, ties to even; the result is still float32."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def sum_lanes(lanes: F32) -> F32:
    """The tree over 16 lanes [..., 16]."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def in_lanes(x: F32) -> F32:
    """[..., n] to [ceil(n / 16), ..., 16], missing elements +0."""
    pad = -x.shape[-1] % LANES
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    return np.moveaxis(padded.reshape(*x.shape[:-1], padded.shape[-1] // LANES, LANES), -2, 0)


@dataclass(frozen=True)
class Quantized:
    """Rows of activations in blocks of 32. d, s: [rows, k / 32]; q: whole numbers [rows, k / 32, 32]; outliers: [rows, k], 0 elsewhere."""

    q: F32
    d: F32
    s: F32
    outliers: F32


def sin_cos(angle: F64) -> tuple[F32, F32]:
    """Sine and cosine, rounded to float32, of angles below 2^20 * pi / 2."""
    n = np.rint(angle * (2 / math.pi))
    r = ((angle - n * _HALF_PI[0]) - n * _HALF_PI[1]) - n * _HALF_PI[2]
    z = r * r
    sin = r + (r * z) * _horner(_SIN, z)
    cos = (1 - 0.5 * z) + (z * z) * _horner(_COS, z)
    quarter = n.astype(np.int64) & 3
    return (
        np.choose(quarter, (sin, cos, -sin, -cos)).astype(np.float32),
        np.choose(quarter, (cos, -sin, -cos, sin)).astype(np.float32),
    )


def _horner(coefficients: tuple[float, ...], z: F64) -> F64:
    total = np.full_like(z, coefficients[0])
    for c in coefficients[1:]:
        total = total * z + c
    return total


def _fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c with one rounding.

    The product is exact in float64. The sum is rounded twice (to float64, to float32), which goes wrong only where the first
    rounding lands on a tie of the second, or below the normal numbers: there the sum is rounded to odd (Boldo and Melquiond,
    2008), after which the second rounding is right.
    """
    product = a.astype(np.float64) * b
    total = np.asarray(product + c)
    bits = total.view(np.int64)
    doubtful = ((bits & 0x1FFFFFFF) == 0x10000000) | (np.abs(total) < 2.0**-126)
    if doubtful.any():
        x, y, s = (np.broadcast_to(v, total.shape)[doubtful] for v in (product, c.astype(np.float64), total))
        back = s - x
        error = (x - (s - back)) + (y - back)
        odd = (error != 0) & (s.view(np.int64) & 1 == 0)
        bits[doubtful] += np.where(odd, np.where((error > 0) == (s > 0), 1, -1), 0)
    return total.astype(np.float32)


@dataclass(frozen=True)
class Arithmetic:
    """The operations of one kind of kernel variant: with or without a fused multiply-add."""

    fused: bool = True

    def fma(self, a: F32, b: F32, c: F32) -> F32:
        """a * b + c elementwise."""
        return _fma(a, b, c) if self.fused else a * b + c

    def dot2(self, a0: F32, a1: F32, b0: F32, b1: F32, acc: F32) -> F32:
        """acc plus the product of the pairs (a0, a1) and (b0, b1) of bf16 numbers."""
        return self.fma(a0, b0, self.fma(a1, b1, acc))

    def quantize(self, x: F32) -> Quantized:
        """Quantise [rows, k] without its outliers, which stay what they are."""
        limit = np.maximum(OUTLIER * np.sqrt(self.mean_square(x)), np.float32(2.0**-60))[:, None]
        outliers = np.where(np.abs(x) > limit, x, np.float32(0))
        blocks = np.where(np.abs(x) > limit, np.float32(0), x).reshape(len(x), x.shape[1] // BLOCK, BLOCK)
        amax = np.abs(blocks).max(axis=-1)
        tiny = amax < np.float32(2.0**-100)
        safe = np.where(tiny, np.float32(1), amax)
        q = np.rint(blocks * np.where(tiny, np.float32(0), np.float32(127) / safe)[..., None])
        d = amax / np.float32(127)
        return Quantized(q, d, d * q.sum(axis=-1), outliers)

    def mean_square(self, x: F32) -> F32:
        """Over the last axis, by lanes."""
        lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
        for part in in_lanes(x):
            lanes = self.fma(part, part, lanes)
        mean: F32 = sum_lanes(lanes) / np.float32(x.shape[-1])
        return mean

    def linear(self, x: F32, weight: RefWeight) -> F32:
        """[rows, k] times weight [outputs, k] transposed, [rows, outputs]."""
        w = weight.content
        acc = np.zeros((len(x), weight.rows), np.float32)
        if not isinstance(w, Blocks):
            for k in range(weight.cols):
                acc = self.fma(w[None, :, k], x[:, k, None], acc)
            return acc
        a = self.quantize(x)
        acc = self._chain(acc, w, a)
        columns = weight.dequantize()
        for k in np.flatnonzero(a.outliers.any(axis=0)).tolist():
            x_k = a.outliers[:, k, None]
            acc = np.where(x_k == 0, acc, self.fma(columns[None, :, k], x_k, acc))
        return acc

    def _chain(self, acc: F32, w: Blocks, a: Quantized) -> F32:
        size = w.q.shape[-1]
        q = a.q.reshape(len(a.q), w.q.shape[1], size)
        for b in range(w.q.shape[1]):
            of_x = b * size // BLOCK
            if w.m is not None:
                acc = self.fma(w.m[None, :, b], a.s[:, of_x, None], acc)
            i = q[:, b] @ (w.q[:, b].astype(np.float32) - np.float32(w.zero)).T  # exact: whole numbers whose sums stay below 2^24
            acc = self.fma(i * w.d[None, :, b], a.d[:, of_x, None], acc)
        return acc

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Over the last axis of [..., n]; weight [n]."""
        r: F32 = np.float32(1) / np.sqrt(self.mean_square(x) + np.float32(eps))
        return (x * r[..., None]) * weight

    def exp2(self, x: F32) -> F32:
        """2 to the power of x; exactly 0 below -126."""
        clamped = np.clip(x, np.float32(-126), np.float32(126))
        n = np.rint(clamped)
        f = clamped - n
        p = np.full_like(f, _EXP2[0])
        for c in _EXP2[1:]:
            p = self.fma(p, f, np.full_like(f, c))
        return np.where(x < -126, np.float32(0), np.ldexp(p, n.astype(np.int32)))

    def silu(self, x: F32) -> F32:
        return x / (np.float32(1) + self.exp2(x * _SILU))

    def gelu_tanh(self, x: F32) -> F32:
        u = self.fma((np.float32(0.044715) * x) * x, x, x)
        return x / (np.float32(1) + self.exp2(u * _GELU))

    def rotate(self, x: F32, sin: F32, cos: F32, interleaved: bool) -> F32:
        """Rotate the pairs of [rows, heads, head_dim] by angles [rows, head_dim / 2]; the result's pairs are (i, i + head_dim / 2)."""
        sin, cos = sin[:, None], cos[:, None]
        half = x.shape[-1] // 2
        x0, x1 = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        return np.concatenate((self.fma(x0, cos, -(x1 * sin)), self.fma(x1, cos, x0 * sin)), axis=-1)
