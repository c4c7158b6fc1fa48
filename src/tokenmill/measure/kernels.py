"""Time of single ops at a model's shapes, beside what the machine allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tokenmill.core.types import FRAME
from tokenmill.kernels.layout import KVFormat, KVLayout
from tokenmill.kernels.native import PackedWeight, Pool
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.measure.machine import largest_cache
from tokenmill.measure.op_programs import TOKENS, LinearKind, ModelOps, attention_program, norm_of
from tokenmill.measure.plot import Chart, Line
from tokenmill.measure.random_weights import pack_copies
from tokenmill.measure.report import Ceilings, Column, Row, Table, by_key
from tokenmill.measure.timing import median_seconds
from tokenmill.weights.tensor import LAYOUTS

ROWS = (1, 4, 16, 32, 128, 512)
MAX_HEAD_ROWS = 64
"""Rows of logits that an engine computes at a time."""

MAX_COPIES = 1024
WORK = 2e10
"""Operations of one run, at least one op: large ops are repeated less often, and are not helped by caches anyway."""

CONTEXTS = (128, 1024, 4096)
STREAMS = (1, 16)
CHUNK = 512
KV_BYTE = 0x3C
"""What the KV pool is filled with, so that it is really there: 0x3c3c is a small bf16."""

_FIGURES = (
    Column("seconds", "us", 1e-6, 1),
    Column("bytes_per_second", "GB/s", 1e9, 1),
    Column("operations_per_second", "GOPS", 1e9, 1),
    Column("floor", "floor us", 1e-6, 1),
    Column("ratio", "ratio", 1, 2),
)


def linear_table() -> Table:
    what = (Column("op", "op"), Column("form", "form"), Column("outputs", "outputs"), Column("cols", "k"))
    title = "linear ops (weights from memory; per pass: how often a model has one)"
    return Table("linear", title, (*what, Column("per_pass", "per pass"), Column("rows", "M"), *_FIGURES))


def attention_table() -> Table:
    what = (Column("phase", "phase"), Column("streams", "streams"), Column("rows", "M"), Column("context", "context"))
    return Table("attention", "attention of one layer, with rotary embedding (KV from memory)", (*what, *_FIGURES))


def input_table() -> Table:
    what = (Column("op", "op"), Column("width", "width"), Column("rows", "M"))
    return Table("inputs", "norm and quantisation before a linear op (in caches: no floor)", (*what, *_FIGURES[:2]))


class OpTimer:
    """Measures ops on one pool. Rows come one by one, so that an interrupted run has what was measured."""

    def __init__(self, pool: Pool, ceilings: Ceilings, seed: int, kv: KVFormat | None = None) -> None:
        self._kv = kv or KVFormat()
        self._pool = pool
        self._ceilings = ceilings
        self._rng = np.random.default_rng(seed)

    def linear(self, kind: LinearKind, per_pass: int, rows: Sequence[int]) -> Iterator[Row]:
        """The op at each number of rows, over as many equal weights as make sure that each comes from memory."""
        size = sum(part.rows * part.cols // LAYOUTS[part.form].block * LAYOUTS[part.form].size for part in kind.parts)
        copies = min(MAX_COPIES, -(-3 * largest_cache() // size))
        weights = self._weights(kind, copies)
        quantised = any(LAYOUTS[part.form].block > 1 for part in kind.parts)
        for m in rows:
            if kind.of_outputs and m > MAX_HEAD_ROWS:
                continue
            operations = kind.operations(m)
            seconds = self._op_seconds(kind, weights, min(copies, max(1, int(WORK / operations))), m)
            floor = self._ceilings.floor(size, **{"int8" if quantised else "bf16": float(operations)})
            what: Row = {"op": kind.name, "form": kind.form, "outputs": kind.outputs, "cols": kind.cols, "per_pass": per_pass, "rows": m}
            yield what | _figures(seconds, size, operations, floor)

    def input(self, kind: LinearKind, rows: Sequence[int]) -> Iterator[Row]:
        """What comes before the op's product: its time with no output, continued from two products of few outputs."""
        few = 32 * self._pool.threads
        narrow, wide = kind.narrowed(few), kind.narrowed(2 * few)
        copies = 16
        weights = [(k, self._weights(k, copies)) for k in (narrow, wide)]
        for m in rows:
            less, more = (self._op_seconds(k, w, copies, m) for k, w in weights)
            seconds = max(0.0, 2 * less - more)
            yield {
                "op": "norm + quantise" if kind.normed else "quantise",
                "width": kind.cols,
                "rows": m,
                "seconds": seconds,
                "bytes_per_second": 4 * m * kind.cols / seconds if seconds else None,
            }

    def attention(self, ops: ModelOps) -> Iterator[Row]:
        """Decoding at several contexts and numbers of streams, and a chunk of a prompt at its start and further on."""
        for context in CONTEXTS:
            for streams in STREAMS:
                if context < ops.context:
                    yield self._attend(ops, "decode", streams, 1, context)
        for context in (0, *CONTEXTS[1:]):
            if context + CHUNK <= ops.context:
                yield self._attend(ops, "prefill", 1, CHUNK, context)

    def _attend(self, ops: ModelOps, phase: str, streams: int, rows: int, context: int) -> Row:
        shape, window = ops.shape, ops.window
        seen = sum(min(at + 1, window or at + 1) for at in range(context, context + rows))
        token_bytes = shape.kv_heads * self._kv.frame_bytes(shape.head_dim) // FRAME
        read = token_bytes * streams * min(context + rows, (window or context) + rows)
        operations = 4 * shape.heads * shape.head_dim * streams * seen
        layers = max(1, min(MAX_COPIES, 2 * largest_cache() // read, int(WORK / operations)))
        frames = -(-(context + rows) // FRAME)
        program = attention_program(shape, window, layers)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        weights = self._input(width) | self._pack("end", "F32", 16, shape.heads * shape.head_dim)
        tape = Tape(program, weights, {}, self._pool, streams * rows, 1, streams * frames, KVLayout.single(program, self._kv))
        tape.fill_kv(KV_BYTE)
        start = np.zeros(1, np.int32)
        segments = [Segment(i * rows, rows, context, (Pages(np.array([i * frames], np.int32), start),)) for i in range(streams)]
        seconds = self._seconds(tape, segments, streams * rows) / layers
        what: Row = {"phase": phase, "streams": streams, "rows": streams * rows, "context": context}
        return what | _figures(seconds, read, operations, self._ceilings.floor(read, bf16=operations))

    def _op_seconds(self, kind: LinearKind, weights: dict[str, PackedWeight], copies: int, rows: int) -> float:
        tape = Tape(kind.program(copies), weights, norm_of(kind), self._pool, rows, 1, -(-rows // FRAME))
        zero = np.zeros(1, np.int32)
        return self._seconds(tape, [Segment(0, rows, 0, (Pages(zero, zero),))], rows) / copies

    def _seconds(self, tape: Tape, segments: list[Segment], rows: int) -> float:
        tokens = self._rng.integers(0, TOKENS, rows).astype(np.int32)
        batch = Batch(tokens, segments, np.zeros(1, np.int32))
        return median_seconds(lambda: tape.run(batch), runs=5, at_least=0.05)

    def _weights(self, kind: LinearKind, copies: int) -> dict[str, PackedWeight]:
        weights = self._input(kind.cols)
        for number, part in enumerate(kind.parts):
            packed = pack_copies(part.form, part.rows, part.cols, copies, self._pool, self._rng)
            weights |= {f"{copy}.{number}": weight for copy, weight in enumerate(packed)}
        return weights

    def _input(self, width: int) -> dict[str, PackedWeight]:
        return self._pack("embed", "F32", TOKENS, width)

    def _pack(self, name: str, form: str, rows: int, cols: int) -> dict[str, PackedWeight]:
        return {name: pack_copies(form, rows, cols, 1, self._pool, self._rng)[0]}


def chart(linear: Table, ceilings: Ceilings | None) -> Chart:
    """Operations per second against rows, a line for each op and form."""
    groups = by_key(({**row, "name": f"{row['op']} {row['form']} {row['outputs']}x{row['cols']}"} for row in linear.rows), "name")
    lines = [
        Line(str(name), [float(row["rows"] or 0) for row in rows], [float(row["operations_per_second"] or 0) / 1e9 for row in rows])
        for name, rows in groups.items()
    ]
    if lines and ceilings is not None:
        ends = [x for line in lines for x in line.xs]
        lines.append(Line("int8 ceiling", [min(ends), max(ends)], [ceilings.int8 / 1e9] * 2, dashed=True))
    return Chart("linear ops", "rows (M)", "GOPS", lines, log_x=True, log_y=True)


def _figures(seconds: float, read: float, operations: float, floor: float) -> Row:
    return {
        "seconds": seconds,
        "bytes_per_second": read / seconds,
        "operations_per_second": operations / seconds,
        "floor": floor,
        "ratio": floor / seconds,
    }
