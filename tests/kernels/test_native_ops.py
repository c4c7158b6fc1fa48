"""Every native kernel variant against the reference, op by op, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.kernels.native import PackedWeight, Pool, variants
from tokenmill.kernels.ops import AddNorm, Batch, Buffer, Embed, Heads, Linear, Pages, Program, RMSNorm, Segment, Select
from tokenmill.kernels.reference import Reference
from tokenmill.kernels.reference_ops import Arithmetic
from tokenmill.kernels.reference_weights import TYPES, RefWeight
from tokenmill.kernels.tape import Tape

ROWS = (*range(1, 13), 15, 16, 17, 23, 64, 512)
OUTPUTS = {1: 96, 15: 32, 16: 160, 17: 64, 33: 288, 100: 512}
"""Odd numbers of outputs, each with a k of its own: one block, an odd number of blocks, many."""

pytestmark = pytest.mark.parametrize("variant", variants())


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def activations(rng, rows, k):
    """Rows of very different sizes, with a block of zeros and a block of numbers too small to quantise.

    In turn some of their elements are outliers, none, one in every block but one, and one in every block.
    """
    x = rng.standard_normal((rows, k))
    some, none, spiked = x[0::4], x[1::4], x[2::4]
    some[rng.random(some.shape) < 0.02] *= 50
    np.clip(none, -2, 2, out=none)
    for i in range(0, k - k % 32, 32):
        for row in (*spiked, *x[3::4]):
            row[i : i + 32] /= 50
            row[i + rng.integers(32)] = rng.choice((-1, 1)) * rng.uniform(1, 1.2)
    for row in spiked:
        quiet = 32 * rng.integers(max(1, k // 32))
        row[quiet : quiet + 32] /= 50
    x *= np.exp(3 * rng.standard_normal((rows, 1)))
    if rows > 8:
        x[5, :32] = 0
        x[8, :32] *= 1e-36
    return x.astype(np.float32)


def identity(n):
    """The file of a float identity matrix: a linear op with it changes no bit."""
    return {"identity": ("F32", n, n, np.eye(n, dtype=np.float32).reshape(-1).view(np.uint8))}


class Bench:
    """Runs ops on chosen activations: the rows of the float embedding `input` are the activations, in buffer x."""

    def __init__(self, x, ops, files, vectors=None):
        self.program = Program(Heads(1, 1, 64), layers=0, ops=[Embed("input", Buffer("x", x.shape[1])), *ops])
        self.files = {"input": ("F32", *x.shape, x.reshape(-1).view(np.uint8)), **files}
        self.vectors = vectors or {}

    @classmethod
    def linear(cls, x, file, **op):
        """One linear op on the wanted rows of x."""
        outputs = file[1]
        last = Buffer("last", x.shape[1], "outputs")
        ops = [Select(Buffer("x", x.shape[1]), last), Linear(last, ("w",), Buffer("out", outputs, "outputs"), **op)]
        return cls(x, ops, {"w": file})

    @classmethod
    def showing(cls, x, ops, shown, files=None, vectors=None):
        """Ops on all rows, of which the buffer `shown` is seen."""
        last, out = Buffer("last", shown.width, "outputs"), Buffer("out", shown.width, "outputs")
        return cls(x, [*ops, Select(shown, last), Linear(last, ("identity",), out)], identity(shown.width) | (files or {}), vectors)

    def reference(self, variant):
        weights = {name: RefWeight.from_bytes(*file) for name, file in self.files.items()}
        return Reference(self.program, weights, self.vectors, 0, fused=variant != "portable")

    def tape(self, pool, rows):
        weights = {name: PackedWeight.pack(*file, pool) for name, file in self.files.items()}
        return Tape(self.program, weights, self.vectors, pool, rows, rows, -(-rows // 8))

    @staticmethod
    def batch(rows, outputs=None):
        """A step that has the given rows of the activations as its rows and wants them all, or `outputs`."""
        table = np.zeros(1, np.int32)
        tokens = np.asarray(rows, np.int32)
        wanted = np.arange(len(tokens)) if outputs is None else outputs
        return Batch(tokens, [Segment(0, len(tokens), 0, (Pages(table, table),))], np.asarray(wanted, np.int32))

    def check(self, variant, step, rows):
        want = self.reference(variant).run(step)
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(self.tape(Pool(2, variant), rows).run(step), want)


@pytest.mark.parametrize("kind", TYPES)
def test_linear_has_the_reference_bits_for_every_number_of_rows(rng, weight_bytes, variant, kind):
    pool = Pool(2, variant)
    for outputs, k in OUTPUTS.items():
        k *= 8 if kind.endswith("_K") else 1
        x = activations(rng, 64, k)
        outliers = (Arithmetic().quantize(x).outliers != 0).sum(axis=1)
        assert {0, k // 32 - 1, k // 32} <= set(outliers)
        bench = Bench.linear(x, (kind, outputs, k, weight_bytes(rng, kind, outputs, k)))
        tape = bench.tape(pool, max(ROWS))
        want = bench.reference(variant).run(bench.batch(range(64)))
        for rows in ROWS:
            chosen = rng.integers(0, 64, rows)
            np.testing.assert_array_equal(tape.run(bench.batch(chosen)), want[chosen])


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_K", "Q5_1", "Q6_K"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_linear_does_not_depend_on_threads(rng, weight_bytes, variant, kind, threads):
    k, outputs = 512, 203
    bench = Bench.linear(activations(rng, 70, k), (kind, outputs, k, weight_bytes(rng, kind, outputs, k)))
    want = bench.reference(variant).run(bench.batch(range(70)))
    tape = bench.tape(Pool(threads, variant), 70)
    for rows in (1, 5, 70):
        np.testing.assert_array_equal(tape.run(bench.batch(range(rows))), want[:rows])


def test_linear_puts_weights_side_by_side_adds_the_bias_and_accumulates(rng, weight_bytes, variant):
    k, kinds = 256, {"Q5_K": 48, "F32": 32, "Q4_1": 16, "Q8_0": 39}
    x, y = Buffer("x", k), Buffer("y", sum(kinds.values()))
    other_way = ("Q4_1", "F32", "Q5_K", "Q8_0")
    ops = [Linear(x, tuple(kinds), y, bias="bias"), Linear(x, other_way, y, bias="bias", result="add")]
    files = {kind: (kind, rows, k, weight_bytes(rng, kind, rows, k)) for kind, rows in kinds.items()}
    bias = rng.standard_normal(y.width).astype(np.float32)
    bench = Bench.showing(activations(rng, 19, k), ops, y, files, {"bias": bias})
    bench.check(variant, bench.batch(range(19)), 19)


def test_a_weight_whose_neighbour_has_a_partial_panel_is_refused(rng, weight_bytes, variant):
    files = [(kind, rows, 64, weight_bytes(rng, kind, rows, 64)) for kind, rows in (("F32", 17), ("Q8_0", 16))]
    x, y = Buffer("x", 64), Buffer("y", 33)
    bench = Bench.showing(activations(rng, 3, 64), [Linear(x, ("F32", "Q8_0"), y)], y, {file[0]: file for file in files})
    with pytest.raises(ValueError, match="multiple of 16"):
        bench.tape(Pool(1, variant), 3)


@pytest.mark.parametrize("kind", TYPES)
def test_embedding_is_the_dequantised_row_times_the_scale(rng, weight_bytes, variant, kind):
    file = (kind, 37, 256, weight_bytes(rng, kind, 37, 256))
    pool = Pool(1, variant)
    weight = PackedWeight.pack(*file, pool)
    exact = RefWeight.from_bytes(*file).dequantize()
    np.testing.assert_array_equal(weight.dequantize(), exact)
    x, last = Buffer("x", 256), Buffer("last", 256, "outputs")
    ops = [Embed("w", x, scale=33.941124), Select(x, last), Linear(last, ("identity",), Buffer("out", 256, "outputs"))]
    weights = {"w": weight, "identity": PackedWeight.pack(*identity(256)["identity"], pool)}
    tokens = rng.integers(0, 37, 21)
    got = Tape(Program(Heads(1, 1, 64), layers=0, ops=ops), weights, {}, pool, 32, 32, 4).run(Bench.batch(tokens))
    np.testing.assert_array_equal(got, exact[tokens] * np.float32(33.941124))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "cols"), [(64, 1024), (576, 256), (1536, 512)])
def test_packing_adds_at_most_two_percent(rng, weight_bytes, variant, kind, rows, cols):
    data = weight_bytes(rng, kind, rows, cols)
    weight = PackedWeight.pack(kind, rows, cols, data, Pool(2, variant))
    assert (weight.rows, weight.cols, weight.form) == (rows, cols, kind)
    assert len(data) <= weight.nbytes <= 1.02 * len(data)


@pytest.mark.parametrize("n", [16, 32, 40, 72, 96, 576])
def test_rms_norm_has_the_reference_bits(rng, variant, n):
    x = activations(rng, 33, n)
    x[5] = 0
    bench = Bench.linear(x, identity(n)["identity"], norm=RMSNorm("norm", 1e-5))
    bench.vectors = {"norm": rng.standard_normal(n).astype(np.float32)}
    bench.check(variant, bench.batch(range(33)), 33)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("n", [16, 40, 96])
def test_gated_activations_have_the_reference_bits(rng, variant, activation, n):
    x = activations(rng, 50, 2 * n)
    x[7, :16] = [0, -0.0, 1e-30, -1e-30, 87, -87, 88.5, -88.5, 200, -200, 1e10, -1e10, 5, -5, 0.1, -0.1]
    gate, up = ((name, "F32", n, 2 * n, np.eye(n, 2 * n, at, dtype=np.float32)) for name, at in (("gate", 0), ("up", n)))
    files = {name: (*shape, content.reshape(-1).view(np.uint8)) for name, *shape, content in (gate, up)}
    out = Buffer("gated", n)
    bench = Bench.showing(x, [Linear(Buffer("x", 2 * n), ("gate", "up"), out, result=activation)], out, files)
    bench.check(variant, bench.batch(range(50)), 50)


def test_add_norm_and_select_have_the_reference_bits(rng, weight_bytes, variant):
    n = 96
    x, y = Buffer("x", n), Buffer("y", n)
    ops = [Linear(x, ("w",), y), AddNorm(x, y, RMSNorm("norm", 1e-6))]
    files = {"w": ("Q8_0", n, n, weight_bytes(rng, "Q8_0", n, n))}
    bench = Bench.showing(activations(rng, 20, n), ops, x, files, {"norm": rng.standard_normal(n).astype(np.float32)})
    bench.check(variant, bench.batch(range(20), outputs=[19, 3, 4]), 20)


def test_the_comparison_sees_the_last_bit(rng, weight_bytes, variant):
    """The other way of rounding, and one weight off by one, are told from the right result."""
    k, outputs = 96, 40
    data = weight_bytes(rng, "Q4_1", outputs, k)
    bench, step = Bench.linear(activations(rng, 8, k), ("Q4_1", outputs, k, data)), Bench.batch(range(8))
    got = bench.tape(Pool(1, variant), 8).run(step).copy()
    other = bench.reference("avx2" if variant == "portable" else "portable").run(step)
    np.testing.assert_allclose(got, other, rtol=1e-3, atol=1e-3 * np.abs(got).max())
    assert (got != other).any()
    data[20 * 3 * 17 + 7] ^= 1  # a quantised value of output 17
    wrong = (bench.reference(variant).run(step) != got).any(axis=0)
    assert wrong[17]
    assert wrong.sum() == 1
