"""KV formats, groups, holes, streaming heads and the weights of pages: every native variant against the reference, to the last bit,
over memory that holds garbage wherever nothing was written."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from tokenmill.core.types import FRAME, Streaming
from tokenmill.kernels.layout import KeyCalibration, KVFormat, KVLayout
from tokenmill.kernels.native import PackedWeight, Pool, variants
from tokenmill.kernels.ops import Attention, Batch, Buffer, Embed, Heads, Linear, Pages, Program, RotateAndStore, Segment, Select
from tokenmill.kernels.reference import Reference
from tokenmill.kernels.reference_weights import RefWeight
from tokenmill.kernels.tape import Tape

pytestmark = pytest.mark.parametrize("variant", variants())
FORMATS = [("int8", "int8"), ("int8", "int4"), ("int4", "int4"), ("bf16", "int4"), ("int4", "bf16")]


@pytest.fixture
def rng():
    return np.random.default_rng(23)


@dataclass
class Layers:
    """Attention layers over chosen q, k and v, all of which are row t of an embedding for token t. Outputs of all layers are added."""

    qkv: np.ndarray
    shape: Heads
    windows: tuple[int | None, ...] = (None,)

    @property
    def program(self):
        s = self.shape
        width = s.heads * s.head_dim
        qkv, attended, total, last, out = (Buffer(n, w, r) for n, w, r in (
            ("qkv", self.qkv.shape[1], "tokens"), ("attended", width, "tokens"), ("total", width, "tokens"),
            ("last", width, "outputs"), ("out", width, "outputs")))  # fmt: skip
        p = Program(s, len(self.windows), ropes=[1e4 ** -(np.arange(s.head_dim // 2) * 2.0 / s.head_dim)])
        p.add(Embed("qkv", qkv))
        for i, window in enumerate(self.windows):
            p.add(RotateAndStore(qkv, i, s, 0, s.head_dim**-0.5 / math.log(2)))
            p.add(Attention(i, s, attended, window))
            p.add(Linear(attended, ("identity",), total, result="add" if i else "store"))
        p.add(Select(total, last))
        p.add(Linear(last, ("identity",), out))
        return p

    def files(self):
        """The identity shows what attention gave: a linear op with it changes no bit."""
        matrices = {"qkv": self.qkv, "identity": np.eye(self.shape.heads * self.shape.head_dim, dtype=np.float32)}
        return {name: ("F32", *x.shape, x.reshape(-1).view(np.uint8)) for name, x in matrices.items()}

    def reference(self, variant, n_frames, layout):
        weights = {name: RefWeight.from_bytes(*file) for name, file in self.files().items()}
        return Reference(self.program, weights, {}, n_frames, layout, fused=variant != "portable")

    def tape(self, variant, threads, rows, n_frames, layout, garbage=0xFF):
        pool = Pool(threads, variant)
        weights = {name: PackedWeight.pack(*file, pool) for name, file in self.files().items()}
        tape = Tape(self.program, weights, {}, pool, rows, rows, n_frames, layout)
        tape.fill_kv(garbage)
        return tape


def random_layers(rng, positions, heads, kv_heads, dim, windows=(None,), size=2.0):
    qkv = rng.standard_normal((positions, (heads + 2 * kv_heads) * dim)) * size
    return Layers(qkv.astype(np.float32), Heads(heads, kv_heads, dim), windows)


def step(pages, position, rows, **segment):
    """A step of one sequence, whose token t is at position t, that wants every row."""
    every = np.arange(rows, dtype=np.int32)
    return Batch(every + np.int32(position), [Segment(0, rows, position, pages, **segment)], every)


def calibration(rng, shape, layers=1):
    size = (layers, shape.kv_heads, shape.head_dim)
    return KeyCalibration(rng.uniform(0.1, 8, size).astype(np.float32), rng.uniform(-20, 20, size).astype(np.float32))


def single(layers, form, calibrated=None):
    plain = KVLayout.single(layers.program, form)
    return KVLayout(form, plain.groups, plain.streaming, calibrated)


SHAPES = [
    # heads, kv heads, head dim, group size
    (1, 1, 16, 32),
    (3, 1, 48, 32),
    (6, 2, 64, 32),
    (7, 1, 64, 64),
    (7, 1, 80, 64),
    (2, 2, 96, 128),
    (9, 1, 128, 128),
    (4, 1, 128, 32),
    (2, 1, 256, 64),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "group"), SHAPES)
@pytest.mark.parametrize(("key", "value"), FORMATS)
def test_integer_formats_have_the_reference_bits(rng, pages, variant, key, value, heads, kv_heads, dim, group):
    """A prompt in chunks over a border of cuts, then single tokens."""
    positions = 545
    layers = random_layers(rng, positions, heads, kv_heads, dim)
    layout = single(layers, KVFormat(key, value, group), calibration(rng, layers.shape) if key != "bf16" and dim != 64 else None)
    table = pages(rng, 90).sequence(positions, page=2)
    tape, reference = layers.tape(variant, 2, 520, 90, layout), layers.reference(variant, 90, layout)
    tape.run(step((table.pages,), 0, 505))
    write_only(reference, layers).run(step((table.pages,), 0, 505))
    for at, rows in ((505, 3), (508, 13), (521, 1), (522, 1)):
        want = reference.run(step((table.pages,), at, rows))
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(tape.run(step((table.pages,), at, rows)), want)


@pytest.mark.parametrize(("key", "value"), [("bf16", "bf16"), *FORMATS])
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_pages_and_threads_do_not_change_a_bit_of_any_format(rng, pages, variant, key, value, threads):
    positions = 1060
    layers = random_layers(rng, positions, 3, 1, 64, (None, 100))
    layout = single(layers, KVFormat(key, value, 32))
    whole = layers.tape(variant, 1, positions, 200, layout).run(step((pages(rng, 200).sequence(positions).pages,), 0, positions)).copy()
    for chunks in ([480] + [1] * 100 + [480], list(rng.multinomial(positions, [1 / 40] * 40))):
        tape = layers.tape(variant, threads, positions, 300, layout, garbage=int(rng.integers(256)))
        table = pages(rng, 300).sequence(positions, page=int(rng.choice([1, 2, 8])))
        at = 0
        for rows in (int(n) for n in chunks if n):
            np.testing.assert_array_equal(tape.run(step((table.pages,), at, rows)), whole[at : at + rows])
            at += rows


def test_formats_come_close_to_bf16_in_their_order(rng, pages, variant):
    """Key biases as of Qwen: without the calibration int8 keys lose what the others say."""
    positions = 300
    layers = random_layers(rng, positions, 4, 1, 64, size=1.0)
    layers.qkv[:, 256 + 5] += 40.0
    layers.qkv[:, 256 + 5 + 32] -= 60.0
    kept = pages(rng, 60).sequence(positions).pages
    reference = layers.reference(variant, 60, single(layers, KVFormat()))
    exact = reference.run(step((kept,), 0, positions))
    slots = (frames_of(kept, positions)[:, None] * FRAME + np.arange(FRAME)).ravel()[:positions]
    k = reference.keys[0].numbers[slots]
    by_channel = KeyCalibration(((k.max(0) - k.min(0)) / 2)[None], ((k.max(0) + k.min(0)) / 2)[None])
    error = {}
    for key, value, calibrated in (("int8", "int8", True), ("int8", "int4", True), ("int4", "int4", True), ("int8", "int8", False)):
        layout = single(layers, KVFormat(key, value), by_channel if calibrated else None)
        got = layers.tape(variant, 2, positions, 60, layout).run(step((kept,), 0, positions))
        error[key, value, calibrated] = float(np.sqrt(np.square(got - exact).mean()) / exact.std())
    assert error["int8", "int8", True] < 0.05 < error["int8", "int4", True] < 0.2 < error["int4", "int4", True]
    assert error["int8", "int8", False] > 3 * error["int8", "int8", True]


def frames_of(kept, positions):
    """The frame of each 8 positions."""
    stop = [*kept.starts[1:], -(-positions // FRAME)]
    runs = [np.arange(f, f + b - a) for f, a, b in zip(kept.frames, kept.starts, stop, strict=True)]
    return np.concatenate(runs).astype(np.int32)


def with_holes(rng, table, frames, before, share=0.3):
    """The table, frame by frame, without a share of its frames before frame number `before`."""
    numbers = frames_of(table, frames * FRAME)
    numbers[:before][rng.random(before) < share] = -1
    return Pages(numbers, np.arange(frames, dtype=np.int32))


@pytest.mark.parametrize(("key", "value"), [("bf16", "bf16"), ("int8", "int4")])
@pytest.mark.parametrize("window", [None, 700])
def test_holes_are_not_seen_and_what_lies_in_them_does_not_matter(rng, pages, variant, key, value, window):
    positions = 1600
    layers = random_layers(rng, positions, 6, 2, 64, (window,))
    layout = single(layers, KVFormat(key, value))
    table = pages(rng, 210).sequence(positions)
    for rows in (1, 5, 40):
        at = positions - rows
        holed = with_holes(rng, table.pages, positions // FRAME, at // FRAME)
        tape, reference = layers.tape(variant, 2, positions, 210, layout), layers.reference(variant, 210, layout)
        tape.run(step((table.pages,), 0, at))
        write_only(reference, layers).run(step((table.pages,), 0, at))
        want = reference.run(step((holed,), at, rows))
        np.testing.assert_array_equal(tape.run(step((holed,), at, rows)), want)
        whole = tape.run(step((table.pages,), at, rows)).copy()
        assert (whole != want).any(axis=1).all()


def write_only(reference, layers):
    """A reference over the same keys and values that stores and does not attend, which takes it long."""
    program = Program(layers.shape, reference.program.layers, [op for op in reference.program.ops if not isinstance(op, Attention)])
    program.ropes = reference.program.ropes
    first = next(op for op in reference.program.ops if isinstance(op, Embed))
    program.ops = [op for op in program.ops if isinstance(op, Embed | RotateAndStore)]
    program.add(Select(first.out, Buffer("none", first.out.width, "outputs")))
    other = Reference(program, reference.weights, {}, 0, reference.layout, fused=reference.arithmetic.fused)
    other.keys, other.values = reference.keys, reference.values
    return other


TWO_LAYERS = ((None, 300), (((0, 0), (0, 1)), ((1, 0), (1, 1))))


@pytest.mark.parametrize(("key", "value"), [("bf16", "bf16"), ("int8", "int8")])
def test_groups_have_page_tables_of_their_own(rng, pages, variant, key, value):
    """Frames below the window have left one group's table, and their memory belongs to another sequence."""
    windows, groups = TWO_LAYERS
    positions, gone = 1100, (1100 - 40 - 300) // FRAME
    layers = random_layers(rng, positions, 4, 2, 64, windows)
    layout = KVLayout(KVFormat(key, value), groups, (None, None))
    pool = pages(rng, 400)
    whole, window, other = (pool.sequence(n) for n in (positions, positions, 200))
    single_tape = layers.tape(variant, 1, positions, 200, single(layers, KVFormat(key, value)))
    want = single_tape.run(step((pages(rng, 200).sequence(positions).pages,), 0, positions))[-40:]
    tape = layers.tape(variant, 2, positions, 400, layout)
    tape.run(step((whole.pages, window.pages), 0, positions - 40))
    numbers = with_holes(rng, window.pages, -(-positions // FRAME), gone, share=1)
    freed = Pages(frames_of(window.pages, positions)[:25], np.arange(25, dtype=np.int32))
    tape.run(step((other.pages, freed), 0, 200))
    np.testing.assert_array_equal(tape.run(step((whole.pages, numbers), positions - 40, 40)), want)


@pytest.mark.parametrize(("key", "value"), [("bf16", "bf16"), ("int8", "int4")])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 8), (16, 64), (48, 600), (528, 24), (16, 1000)])
def test_streaming_heads_see_sinks_and_the_last_positions(rng, pages, variant, key, value, sinks, recent):
    positions = 1300
    layers = random_layers(rng, positions, 4, 2, 64, (None, 900))
    layout = KVLayout(KVFormat(key, value), (((0, 0), (1, 1)), ((0, 1), (1, 0))), (None, Streaming(sinks, recent)))
    pool = pages(rng, 400)
    tables = [pool.sequence(positions) for _ in range(2)]
    kept = tuple(t.pages for t in tables)
    for rows in (1, 37):
        at = positions - rows
        tape, reference = layers.tape(variant, 3, positions, 400, layout), layers.reference(variant, 400, layout)
        tape.run(step(kept, 0, at))
        write_only(reference, layers).run(step(kept, 0, at))
        want = reference.run(step(kept, at, rows, sparse=True))
        np.testing.assert_array_equal(tape.run(step(kept, at, rows, sparse=True)), want)
        # the same once the middle is gone
        numbers = with_holes(rng, kept[1], -(-positions // FRAME), 0)
        numbers.frames[sinks // FRAME : max(sinks // FRAME, (at - recent + 1) // FRAME)] = -1
        np.testing.assert_array_equal(tape.run(step((kept[0], numbers), at, rows, sparse=True)), want)
        assert (tape.run(step(kept, at, rows)) != want).any(axis=1).all()


@pytest.mark.parametrize(("key", "value"), [("bf16", "bf16"), ("int8", "int4")])
def test_weights_of_frames_are_those_of_the_softmax(rng, pages, variant, key, value):
    positions, rows = 1190, 64
    layers = random_layers(rng, positions, 6, 2, 64, (None, 300))
    layout = single(layers, KVFormat(key, value))
    table, at = pages(rng, 200).sequence(positions), positions - rows
    holed = with_holes(rng, table.pages, -(-positions // FRAME), at // FRAME, share=0.1)
    tape, reference = layers.tape(variant, 3, positions, 200, layout), layers.reference(variant, 200, layout)
    tape.run(step((table.pages,), 0, at))
    write_only(reference, layers).run(step((table.pages,), 0, at))
    want, got = (np.zeros((4, 150), np.int64) for _ in range(2))
    asked = step((holed,), at, rows, weigh=0)
    np.testing.assert_array_equal(
        tape.run(Batch(asked.tokens, asked.segments, asked.outputs, (got,))),
        reference.run(Batch(asked.tokens, asked.segments, asked.outputs, (want,))),
    )
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(got.sum(axis=1) / 2**32, rows * 3, rtol=0.01)  # p of bf16 values is rounded before it is summed up
    assert (got[:, :149][:, holed.frames == -1] == 0).all()
    # in chunks, the sum is the same
    parts = np.zeros_like(got)
    for start in range(at, positions, 16):
        asked = step((holed,), start, 16, weigh=0)
        tape.run(Batch(asked.tokens, asked.segments, asked.outputs, (parts,)))
    np.testing.assert_array_equal(parts, got)


def test_weights_outlive_their_caller_while_a_step_is_in_flight(rng, pages, variant):
    """A view of the logits keeps the tape, and so the threads at work, beyond everything that Python knows of the step."""
    layers = random_layers(rng, 300, 4, 2, 64)
    table = pages(rng, 50).sequence(300)
    tape = layers.tape(variant, 3, 300, 50, single(layers, KVFormat()))
    view = tape.run(step((table.pages,), 0, 300))
    asked, weights = step((table.pages,), 0, 300, weigh=0), np.zeros((2, 40), np.int64)
    kept = weakref.ref(weights)
    tape.start(Batch(asked.tokens, asked.segments, asked.outputs, (weights,)))
    del tape, asked, weights
    assert kept() is not None
    del view
    assert kept() is None


def test_a_layout_that_does_not_fit_is_refused(rng, variant):
    layers = random_layers(rng, 8, 2, 2, 64, (None, None))
    for groups, rule in (
        ((((0, 0), (0, 1), (1, 0)),), None),
        ((((0, 0), (0, 1), (1, 0), (1, 0)),), None),
        ((((0, 0), (0, 1), (1, 0), (2, 1)),), None),
        ((((0, 0), (0, 1), (1, 0), (1, 1)),), SimpleNamespace(sinks=8, recent=64)),
        ((((0, 0), (0, 1), (1, 0), (1, 1)),), SimpleNamespace(sinks=16, recent=60)),
    ):
        with pytest.raises(ValueError, match=r"\[tape\]"):
            layers.tape(variant, 1, 8, 2, KVLayout(KVFormat(), groups, (rule,)))
    with pytest.raises(ValueError, match="group_size is 48"):
        KVFormat("int8", "int8", 48)
    bad = KeyCalibration(np.zeros((2, 2, 64), np.float32), np.zeros((2, 2, 64), np.float32))
    with pytest.raises(ValueError, match="above 0"):
        layers.tape(variant, 1, 8, 2, single(layers, KVFormat("int8", "int8"), bad))
