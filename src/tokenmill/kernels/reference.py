"""A `Program` run in NumPy by the letter of docs/numerics.md: the oracle of the native tape."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import FRAME
from tokenmill.kernels.ops import (
    AddNorm,
    Attention,
    Batch,
    Buffer,
    Embed,
    Linear,
    Program,
    RMSNorm,
    RotateAndStore,
    Segment,
    Select,
)
from tokenmill.kernels.reference_ops import F32, I64, Arithmetic, bf16, sin_cos
from tokenmill.kernels.reference_weights import RefWeight


class Reference:
    """Runs batches of one program over its own KV of `n_frames` frames. `fused=False` gives the numbers of the portable variant.

    vectors: norm weights and biases, float32 1-D. keys, values: bf16 numbers, float32 [layers, n_frames * 8, kv_heads, head_dim].
    """

    def __init__(
        self, program: Program, weights: Mapping[str, RefWeight], vectors: Mapping[str, F32], n_frames: int, *, fused: bool = True
    ) -> None:
        self.program = program
        self.weights = weights
        self.vectors = vectors
        self.arithmetic = Arithmetic(fused)
        shape = (program.layers, n_frames * FRAME, program.shape.kv_heads, program.shape.head_dim)
        # NaN: what was never written must not be read
        self.keys = np.full(shape, np.nan, np.float32)
        self.values = np.full(shape, np.nan, np.float32)

    def run(self, batch: Batch) -> F32:
        """The logits of the wanted rows, float32 [outputs, vocabulary]."""
        buffers: dict[str, F32] = {}
        queries = np.empty(0, np.float32)
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

    def _rotate_and_store(self, op: RotateAndStore, qkv: F32, batch: Batch) -> F32:
        heads, kv_heads, dim = op.shape.heads, op.shape.kv_heads, op.shape.head_dim
        q, k, v = np.split(qkv.reshape(len(qkv), -1, dim), (heads, heads + kv_heads), axis=1)
        if op.q_norm is not None:
            q = self.arithmetic.rms_norm(q, self.vectors[op.q_norm], op.eps)
        if op.k_norm is not None:
            k = self.arithmetic.rms_norm(k, self.vectors[op.k_norm], op.eps)
        positions = np.concatenate([_positions(s) for s in batch.segments])
        sin, cos = sin_cos(positions[:, None] * self.program.ropes[op.rope])
        q, k = (self.arithmetic.rotate(x, sin, cos, op.interleaved) for x in (q, k))
        for segment in batch.segments:
            rows, slots = _rows(segment), _slots(segment, _positions(segment))
            self.keys[op.layer, slots] = bf16(k[rows])
            self.values[op.layer, slots] = bf16(v[rows])
        return bf16(q * np.float32(op.scale))

    def _attention(self, op: Attention, queries: F32, batch: Batch) -> F32:
        out = np.empty((len(batch.tokens), op.out.width), np.float32)
        for segment in batch.segments:
            positions = _positions(segment)
            origin = 0 if op.window is None else max(0, segment.position - op.window + 1)
            slots = _slots(segment, np.arange(origin, positions[-1] + 1))
            k, v = self.keys[op.layer, slots], self.values[op.layer, slots]
            rows = _rows(segment)
            out[rows] = self.arithmetic.attention(queries[rows], k, v, positions, origin, op.window).reshape(segment.rows, -1)
        return out


def _rows(segment: Segment) -> slice:
    return slice(segment.row, segment.row + segment.rows)


def _positions(segment: Segment) -> I64:
    return np.arange(segment.position, segment.position + segment.rows)


def _slots(segment: Segment, positions: I64) -> npt.NDArray[np.int64]:
    """Where the positions of a sequence lie: frame * 8 + offset."""
    number = positions // FRAME
    extent = np.searchsorted(segment.starts, number, side="right") - 1
    frames, starts = np.asarray(segment.frames, np.int64), np.asarray(segment.starts, np.int64)
    frame = frames[extent] + (number - starts[extent])
    return frame * FRAME + positions % FRAME
