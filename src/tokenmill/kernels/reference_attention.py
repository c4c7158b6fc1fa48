"""Attention in cuts of 512 positions, by the letter of docs/numerics.md, in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import CUT, FRAME
from tokenmill.kernels.reference_kv import Digits, Rounding, Stored
from tokenmill.kernels.reference_ops import F32, I64, LANES, Arithmetic, bf16, in_lanes, sum_lanes

Mask = npt.NDArray[np.bool_]


def attention(rounding: Rounding, q: F32 | Digits, k: Stored, v: Stored, visible: Mask) -> tuple[F32, Softmax]:
    """Attention of q [rows, heads, head_dim] over keys and values at positions 0, 1, … [n, kv heads, head_dim], of which a row sees
    those that `visible` [rows, n] says, at least one. q includes the scale and log2 e. What no row sees is not looked at.

    Returns [rows, heads, head_dim], and what it came from.
    """
    first = q if isinstance(q, np.ndarray) else q.high
    group = first.shape[1] // k.numbers.shape[1]
    total = Softmax(rounding.arithmetic, first.shape)
    for start in range(0, visible.shape[1], CUT):
        seen = visible[:, start : start + CUT]
        rows = np.flatnonzero(seen.any(axis=1))
        if not len(rows):
            continue
        keys, values = (_cut(x, start, seen, group) for x in (k, v))
        used = len(keys.numbers)
        seen = np.pad(seen[rows], [(0, 0), (0, LANES)])[:, :used]
        total.merge(rows, *attend_cut(rounding, _rows(q, rows), keys, values, seen))
    return total.result, total


def attend_cut(rounding: Rounding, q: F32 | Digits, k: Stored, v: Stored, visible: Mask) -> tuple[F32, F32, F32]:
    """One cut: k and v have as many heads as q, and whole tiles of 16 positions; visible [rows, positions], some in every row.

    Returns m [rows, heads], l [rows, heads], o [rows, heads, head_dim].
    """
    arithmetic, visible = rounding.arithmetic, visible[:, None]
    score = rounding.scores(q, k)
    m = np.where(visible, score, -np.inf).max(axis=-1)
    p = arithmetic.exp2(np.minimum(score - m[..., None], np.float32(0)))
    p = np.where(visible, bf16(p) if rounding.format.value == "bf16" else p, np.float32(0))
    lanes = np.zeros((*p.shape[:2], LANES), np.float32)
    for part in in_lanes(p):
        lanes = lanes + part
    return m, sum_lanes(lanes), rounding.weigh(p, v)


def frame_weights(rounding: Rounding, q: F32 | Digits, k: Stored, visible: Mask, total: Softmax) -> I64:
    """What the rows of all heads weigh each frame, int64 [frames], after `attention`."""
    first = q if isinstance(q, np.ndarray) else q.high
    heads = first.shape[1]
    out = np.zeros(-(-visible.shape[1] // CUT) * (CUT // FRAME), np.int64)
    for start in range(0, visible.shape[1], CUT):
        seen = visible[:, start : start + CUT]
        keys = _cut(k, start, seen, heads // k.numbers.shape[1])
        score = rounding.scores(q, keys)
        seen = np.pad(seen, [(0, 0), (0, LANES)])[:, : score.shape[2]]
        p = np.where(seen[:, None], rounding.arithmetic.exp2(np.minimum(score - total.m[..., None], np.float32(0))), np.float32(0))
        share = np.zeros((len(p), heads, p.shape[2] // FRAME), np.float32)
        for i in range(FRAME):
            share = share + p[..., i::FRAME]
        share = share * (np.float32(1) / total.l)[..., None]
        fixed = (share.astype(np.float64) * 2.0**32 + 0.5).astype(np.int64)
        out[start // FRAME :][: share.shape[2]] += fixed.sum(axis=(0, 1))
    return out[: -(-visible.shape[1] // FRAME)]


def _cut(x: Stored, start: int, visible: Mask, group: int) -> Stored:
    """The positions of a cut up to the last tile of which something is seen, each head once for every query head that reads it."""
    seen: Mask = np.logical_or.reduce(visible, axis=0)
    used = -(-(int(np.flatnonzero(seen)[-1]) + 1) // LANES) * LANES if seen.any() else 0
    at = np.where(np.pad(seen, (0, LANES))[:used], np.arange(start, start + used), -1)
    part = x.take(at)
    return Stored(*(np.repeat(y, group, axis=1) for y in (part.numbers, part.scale, part.minimum)))


def _rows(q: F32 | Digits, rows: I64) -> F32 | Digits:
    return q[rows] if isinstance(q, np.ndarray) else q.take(rows)


class Softmax:
    """Cuts merged in the order in which they come: maximum m and sum l [rows, heads], o [rows, heads, head_dim]."""

    def __init__(self, arithmetic: Arithmetic, shape: tuple[int, ...]) -> None:
        self.arithmetic = arithmetic
        self.m = np.full(shape[:2], -np.inf, np.float32)
        self.l = np.zeros(shape[:2], np.float32)
        self.o = np.zeros(shape, np.float32)

    def merge(self, rows: I64, m: F32, l: F32, o: F32) -> None:  # noqa: E741
        # before the first cut the maximum is -inf, so that a is 0, b is 1 and the cut is taken over as it is
        fma, exp2 = self.arithmetic.fma, self.arithmetic.exp2
        top = np.maximum(self.m[rows], m)
        a, b = exp2(self.m[rows] - top), exp2(m - top)
        self.m[rows] = top
        self.l[rows] = fma(self.l[rows], a, l * b)
        self.o[rows] = fma(self.o[rows], a[..., None], o * b[..., None])

    @property
    def result(self) -> F32:
        return self.o * (np.float32(1) / self.l)[..., None]
