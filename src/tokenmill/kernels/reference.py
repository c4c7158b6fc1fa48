"""A `Program` run in NumPy by the letter of docs/numerics.md: the oracle of the native tape."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tokenmill.core.types import FRAME
from tokenmill.kernels.layout import KVLayout
from tokenmill.kernels.ops import (
    AddNorm,
    Attention,
    Batch,
    Buffer,
    Embed,
    Linear,
    Pages,
    Program,
    RMSNorm,
    RotateAndStore,
    Segment,
    Select,
)
from tokenmill.kernels.reference_attention import Mask, attention, frame_weights
from tokenmill.kernels.reference_kv import Digits, Rounding
from tokenmill.kernels.reference_ops import F32, I64, Arithmetic, sin_cos
from tokenmill.kernels.reference_weights import RefWeight


class Reference:
    """Runs batches of one program over its own KV of `n_frames` frames. `fused=False` gives the numbers of the portable variant.

    vectors: norm weights and biases, float32 1-D. keys, values: per layer, those of n_frames * 8 positions. Frames belong to a pair here,
    so that two groups that write to the same one go unnoticed.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, RefWeight],
        vectors: Mapping[str, F32],
        n_frames: int,
        layout: KVLayout | None = None,
        *,
        fused: bool = True,
    ) -> None:
        self.program = program
        self.weights = weights
        self.vectors = vectors
        self.layout = layout or KVLayout.single(program)
        self.arithmetic = Arithmetic(fused)
        shape = program.shape
        self.rounding = Rounding(self.layout.format, shape.head_dim, self.arithmetic)
        empty = [self.rounding.empty(n_frames * FRAME, shape.kv_heads) for _ in range(2 * program.layers)]
        self.keys, self.values = empty[::2], empty[1::2]
        self._group = self.layout.group_of()
        ones = np.ones((program.layers, shape.kv_heads, shape.head_dim), np.float32)
        calibration = self.layout.calibration
        self._factor, self._zero = (ones, 0 * ones) if calibration is None else (calibration.factor, calibration.zero)

    def run(self, batch: Batch) -> F32:
        """The logits of the wanted rows, float32 [outputs, vocabulary]."""
        buffers: dict[str, F32] = {}
        queries: list[F32 | Digits] = []
        out: Buffer | None = None
        for op in self.program.ops:
            match op:
                case Embed():
                    rows = self.weights[op.weight].take(np.asarray(batch.tokens)) * np.float32(op.scale)
                    buffers[op.out.name], out = rows, op.out
                case Linear():
                    buffers[op.out.name], out = self._linear(op, buffers), op.out
                case RotateAndStore():
                    queries = self._rotate_and_store(op, buffers[op.qkv.name], batch)
                case Attention():
                    buffers[op.out.name], out = self._attention(op, queries, batch), op.out
                case AddNorm():
                    buffers[op.x.name], out = buffers[op.x.name] + self._norm(op.norm, buffers[op.y.name]), op.x
                case Select():
                    buffers[op.out.name], out = buffers[op.x.name][batch.outputs], op.out
        assert out is not None, "a program without ops has no logits"
        return buffers[out.name]

    def _norm(self, norm: RMSNorm, x: F32) -> F32:
        return self.arithmetic.rms_norm(x, self.vectors[norm.weight], norm.eps)

    def _linear(self, op: Linear, buffers: dict[str, F32]) -> F32:
        x = buffers[op.x.name]
        if op.norm is not None:
            x = self._norm(op.norm, x)
        parts = [self.arithmetic.linear(x, self.weights[name]) for name in op.weights]
        if op.result in ("silu", "gelu_tanh"):
            gate, up = parts
            return (self.arithmetic.silu if op.result == "silu" else self.arithmetic.gelu_tanh)(gate) * up
        y = np.concatenate(parts, axis=1)
        if op.bias is not None:
            y = y + self.vectors[op.bias]
        return buffers[op.out.name] + y if op.result == "add" else y

    def _rotate_and_store(self, op: RotateAndStore, qkv: F32, batch: Batch) -> list[F32 | Digits]:
        """Writes keys and values; returns the queries of each kv head."""
        heads, kv_heads, dim = op.shape.heads, op.shape.kv_heads, op.shape.head_dim
        q, k, v = np.split(qkv.reshape(len(qkv), -1, dim), (heads, heads + kv_heads), axis=1)
        if op.q_norm is not None:
            q = self.arithmetic.rms_norm(q, self.vectors[op.q_norm], op.eps)
        if op.k_norm is not None:
            k = self.arithmetic.rms_norm(k, self.vectors[op.k_norm], op.eps)
        positions = np.concatenate([_positions(s) for s in batch.segments])
        sin, cos = sin_cos(positions[:, None] * self.program.ropes[op.rope])
        q, k = (self.arithmetic.rotate(x, sin, cos, op.interleaved) for x in (q, k))
        keys, values = self.rounding.keys(k, self._factor[op.layer], self._zero[op.layer]), self.rounding.values(v)
        for segment in batch.segments:
            rows = _rows(segment)
            for head in range(kv_heads):
                slots = _slots(segment.pages[self._group[op.layer, head]], _positions(segment))
                assert (slots >= 0).all(), "a position that is written lies in a hole"
                self.keys[op.layer].put(slots, keys, rows, head)
                self.values[op.layer].put(slots, values, rows, head)
        scaled = (q * np.float32(op.scale)).reshape(len(q), kv_heads, -1, dim)
        return [self.rounding.queries(scaled[:, head], self._factor[op.layer, head]) for head in range(kv_heads)]

    def _attention(self, op: Attention, queries: list[F32 | Digits], batch: Batch) -> F32:
        out = np.empty((len(batch.tokens), op.shape.kv_heads, op.out.width // op.shape.kv_heads), np.float32)
        for segment in batch.segments:
            rows = _rows(segment)
            for head, q in enumerate(queries):
                group = self._group[op.layer, head]
                at = _slots(segment.pages[group], np.arange(segment.position + segment.rows))
                visible = self._visible(segment, group, op.window) & (at >= 0)
                at = np.where(visible.any(axis=0), at, -1)
                k, v = (x[op.layer].take(at, head) for x in (self.keys, self.values))
                mine = _part(q, rows)
                result, total = attention(self.rounding, mine, k, v, visible)
                out[rows, head] = result.reshape(segment.rows, -1)
                if segment.weigh >= 0:
                    shares = frame_weights(self.rounding, mine, k, visible, total)
                    batch.weights[segment.weigh][op.layer * op.shape.kv_heads + head, : len(shares)] += shares
        return out.reshape(len(out), -1)

    def _visible(self, segment: Segment, group: int, window: int | None) -> Mask:
        """What the rows [rows, positions] of a segment see but for holes."""
        t, j = _positions(segment)[:, None], np.arange(segment.position + segment.rows)
        visible = j <= t
        if window is not None:
            visible &= j > t - window
        rule = self.layout.streaming[group]
        if segment.sparse and rule is not None:
            visible &= (j < rule.sinks) | (j > t - rule.recent)
        return visible


def _rows(segment: Segment) -> slice:
    return slice(segment.row, segment.row + segment.rows)


def _part(q: F32 | Digits, rows: slice) -> F32 | Digits:
    return q[rows] if isinstance(q, np.ndarray) else q.take(rows)


def _positions(segment: Segment) -> I64:
    return np.arange(segment.position, segment.position + segment.rows)


def _slots(pages: Pages, positions: I64) -> I64:
    """Where the positions of a sequence lie: frame * 8 + offset, or -1 in a hole or before the pages."""
    number = positions // FRAME
    extent = np.searchsorted(pages.starts, number, side="right") - 1
    frames, starts = np.asarray(pages.frames, np.int64), np.asarray(pages.starts, np.int64)
    slots = (frames[extent] + (number - starts[extent])) * FRAME + positions % FRAME
    return np.where((extent >= 0) & (frames[extent] >= 0), slots, -1)
