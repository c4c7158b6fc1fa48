"""Records a `Program` into the native tape, and replays it once per step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenmill import _native
from tokenmill.kernels.frames import Geometry, KVMemory
from tokenmill.kernels.layout import KVLayout
from tokenmill.kernels.native import PackedWeight, Pool
from tokenmill.kernels.ops import (
    AddNorm,
    Attention,
    Batch,
    Embed,
    Int32s,
    Linear,
    Pages,
    Program,
    RotateAndStore,
    Select,
)

F32 = npt.NDArray[np.float32]

_NONE = np.empty(0, np.float32)


class _Extents:
    """Page tables as the native tape takes them: (first extent, extents) of each, and all extents."""

    def __init__(self) -> None:
        self.tables, self.frames, self.starts = array("i"), array("i"), array("i")

    def add(self, tables: Sequence[Pages]) -> None:
        for pages in tables:
            self.tables.extend((len(self.frames), len(pages.frames)))
            self.frames.extend(pages.frames)
            self.starts.extend(pages.starts)


class Tape:
    """A program ready to run: activations, KV pool and scratch memory are its own; weights are shared.

    Holds up to `max_rows` rows and `max_outputs` wanted rows per step and `n_frames` frames of KV, all groups together. Memory is
    reserved here and becomes resident when first used. layout: None keeps bf16 in one group. shared: other processes can map the KV
    pool, which then has large pages only where the system gives them to shared memory (docs/transfer.md). Raises ValueError if the
    layout does not fit the program, RuntimeError if the system gives no shared memory.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, PackedWeight],
        vectors: Mapping[str, F32],
        pool: Pool,
        max_rows: int,
        max_outputs: int,
        n_frames: int,
        layout: KVLayout | None = None,
        shared: bool = False,
    ) -> None:
        self._pool = pool
        self._n_frames = n_frames
        self._shared = shared
        self._layers = program.layers
        self._shape = shape = program.shape
        self.layout = layout or KVLayout.single(program)
        widest = max(weights[name].cols for op in program.ops if isinstance(op, Linear) for name in op.weights)
        self._native = _native.Tape(
            pool=pool.native,
            variant=pool.variant,
            max_rows=max_rows,
            max_outputs=max_outputs,
            max_cols=widest,
            frames=n_frames,
            layers=program.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            key=self.layout.format.key,
            value=self.layout.format.value,
            group_size=self.layout.format.group_size,
            groups=self.layout.groups,
            streaming=[(0, 0) if rule is None else (rule.sinks, rule.recent) for rule in self.layout.streaming],
            shared=shared,
        )
        if self.layout.calibration is not None:
            for layer, (factor, zero) in enumerate(zip(self.layout.calibration.factor, self.layout.calibration.zero, strict=True)):
                self._native.calibrate(
                    layer, np.ascontiguousarray(factor, np.float32).ravel(), np.ascontiguousarray(zero, np.float32).ravel()
                )
        last = program.ops[-1]
        assert isinstance(last, Linear), "a program ends with the linear op that gives the logits"
        self._index = {b.name: self._native.add_buffer(b.width, b.rows == "outputs", b == last.out) for b in program.buffers}
        for inverse in program.ropes:
            self._native.add_rope(np.ascontiguousarray(inverse, np.float64))
        self._weights = weights
        self._vectors = vectors
        for op in program.ops:
            self._record(op)
        self._logits = self._native.buffer(self._index[last.out.name], max_outputs)
        self._wanted = self._logits  # the first rows, as many as the last step gave: mostly the same from step to step
        self._outputs = 0

    def start(self, batch: Batch) -> None:
        """Begin a step: the pool's other threads set to work on it, and the caller is free until `finish`.

        Raises ValueError, before anything is written, if the batch does not fit the tape, and RuntimeError while the pool is
        at work: between `start` and `finish` nothing else can use its threads.
        """
        segments, extents = array("i"), _Extents()
        for s in batch.segments:
            segments.extend((s.row, s.rows, s.position, len(s.pages), s.sparse, s.weigh))
            extents.add(s.pages)
        self._native.start(batch.tokens, segments, extents.tables, extents.frames, extents.starts, batch.outputs, batch.weights)
        self._outputs = len(batch.outputs)

    def finish(self) -> F32:
        """Help with the step that was started until it is executed; returns the logits [outputs, vocabulary], a view
        (rows lie apart) that the next start overwrites. Raises RuntimeError when no step was started."""
        self._native.finish()
        return self._rows(self._outputs)

    def run(self, batch: Batch) -> F32:
        """`start` and `finish`."""
        self.start(batch)
        return self.finish()

    def rerun(self, outputs: Int32s) -> F32:
        """The logits of other rows of the last finished step, whose activations are still there. Same view as `finish`'s."""
        self._native.rerun(outputs)
        return self._rows(len(outputs))

    def give_way(self) -> None:
        """Have each of the pool's threads yield its CPU once, before it begins with another step."""
        self._pool.give_way()

    def keys(self, pages: Sequence[Pages], count: int) -> F32:
        """The keys at a sequence's first `count` positions as they are stored, after the rotation: float32 [layers, kv_heads, count,
        head_dim]; integer keys are turned back. pages: one per KV group.

        Raises ValueError if one of the positions has no frame, and RuntimeError while the pool is at work.
        """
        extents = _Extents()
        extents.add(pages)
        out = np.empty((self._layers, self._shape.kv_heads, count, self._shape.head_dim), np.float32)
        self._native.read_keys(extents.tables, extents.frames, extents.starts, out.reshape(-1, count, self._shape.head_dim))
        return out

    @property
    def memory(self) -> KVMemory:
        """The KV pool as bytes. Frames that a step in flight reads or writes are not to be written or read."""
        piece_bytes = self.layout.format.frame_bytes(self._shape.head_dim)
        slots = tuple(len(group) for group in self.layout.groups)
        geometry = Geometry(slots, self._n_frames * piece_bytes, piece_bytes, self._n_frames)
        return KVMemory(self._native.kv, geometry, self._native.kv_descriptor if self._shared else None)

    @property
    def kv_bytes(self) -> int:
        return self._native.kv_bytes

    def fill_kv(self, byte: int) -> None:
        """Overwrite the whole KV pool: tests prove that what was never written is never seen, benchmarks make all of it resident."""
        self._native.fill_kv(byte)

    def _rows(self, count: int) -> F32:
        if len(self._wanted) != count:
            self._wanted = self._logits[:count]
        return self._wanted

    def _vector(self, name: str | None) -> F32:
        return _NONE if name is None else np.ascontiguousarray(self._vectors[name], np.float32)

    def _record(self, op: object) -> None:
        tape, index = self._native, self._index
        match op:
            case Embed():
                tape.embed(self._weights[op.weight].native, index[op.out.name], op.scale)
            case Linear():
                norm, eps = (_NONE, 0.0) if op.norm is None else (self._vector(op.norm.weight), op.norm.eps)
                weights = [self._weights[name].native for name in op.weights]
                tape.linear(index[op.x.name], weights, index[op.out.name], norm, eps, self._vector(op.bias), op.result)
            case RotateAndStore():
                norms = (self._vector(op.q_norm), self._vector(op.k_norm))
                tape.rotate_store(index[op.qkv.name], op.layer, op.rope, op.scale, op.interleaved, *norms, op.eps)
            case Attention():
                tape.attention(op.layer, index[op.out.name], op.window or 0)
            case AddNorm():
                tape.add_norm(index[op.x.name], index[op.y.name], self._vector(op.norm.weight), op.norm.eps)
            case Select():
                tape.select(index[op.x.name], index[op.out.name])
            case _:
                raise AssertionError(f"unknown op {op!r}")
