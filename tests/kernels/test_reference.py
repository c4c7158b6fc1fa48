"""The oracle against definitions that share nothing with it: gguf's dequantisation, exact rationals, float64 formulas."""

from __future__ import annotations

import math
from fractions import Fraction

import gguf
import numpy as np
import pytest

from tokenmill.kernels.layout import KVFormat
from tokenmill.kernels.ops import Batch
from tokenmill.kernels.reference_attention import Softmax, attention
from tokenmill.kernels.reference_kv import Rounding
from tokenmill.kernels.reference_ops import Arithmetic, Quantized, bf16, sin_cos
from tokenmill.kernels.reference_weights import TYPES, RefWeight

FUSED = Arithmetic()
BOTH = pytest.mark.parametrize("arithmetic", [FUSED, Arithmetic(fused=False)], ids=["fused", "unfused"])


@pytest.fixture
def rng():
    return np.random.default_rng(20240607)


def floats(rng, *shape, spread=0.0):
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype(np.float32)


@pytest.mark.parametrize("kind", TYPES)
def test_weights_dequantise_as_gguf_does_bit_for_bit(rng, weight_bytes, kind):
    rows, cols = 5, 768
    data = weight_bytes(rng, kind, rows, cols, 3.0)
    plain = {"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)
    want = gguf.quants.dequantize(data.reshape(rows, -1).view(plain), gguf.GGMLQuantizationType[kind])
    weight = RefWeight.from_bytes(kind, rows, cols, data)
    np.testing.assert_array_equal(weight.dequantize(), want)
    np.testing.assert_array_equal(weight.take(np.array([3, 0, 3], np.int32)), want[[3, 0, 3]])


def test_bf16_rounds_to_nearest_with_ties_to_even():
    ulp = 2.0**-7
    x = np.array([1 + 0.5 * ulp, 1 + 1.5 * ulp, 1 + 0.5001 * ulp, -(1 + 0.5 * ulp), 0.0, 3.3e38], np.float32)
    np.testing.assert_array_equal(bf16(x), np.array([1, 1 + 2 * ulp, 1 + ulp, -1, 0, 3.3e38 // 2.0**120 * 2.0**120], np.float32))


def test_fma_rounds_once(rng):
    a, b, c = (floats(rng, 3000, spread=2) for _ in range(3))
    # sums that all but cancel, and sums a hair beside a tie, where rounding through float64 goes wrong
    c[:1000] = -(a * b)[:1000] * np.float32(1 + 2.0**-20)
    a[1000:2000], b[1000:2000] = np.float32(1 + 2.0**-23), np.float32(2.0**-24 * (1 - 2.0**-23))
    c[1000:2000] = rng.integers(2**23, 2**24, 1000) * 2.0**-23
    a[2000:2500], b[2000:2500], c[2000:2500] = a[2000:2500] * 1e-22, b[2000:2500] * 1e-22, 0
    got = FUSED.fma(a, b, c)
    assert (got != (a.astype(np.float64) * b + c).astype(np.float32)).sum() > 100, "no case told one rounding from two"
    for x, y, z, r in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(r)) - exact)
        for other in (np.nextafter(r, np.float32(-np.inf)), np.nextafter(r, np.float32(np.inf))):
            gap = abs(Fraction(float(other)) - exact) - error
            assert gap > 0 or (gap == 0 and r.view(np.uint32) % 2 == 0), (x, y, z, r)


@BOTH
def test_exp2_is_within_an_ulp(arithmetic):
    x = np.linspace(-125.9, 125.9, 300_001).astype(np.float32)
    exact = np.exp2(x.astype(np.longdouble))
    assert np.abs(arithmetic.exp2(x) / exact - 1).max() < 2.0**-23
    whole = np.arange(-126, 127).astype(np.float32)
    np.testing.assert_array_equal(arithmetic.exp2(whole), np.ldexp(np.float32(1), whole.astype(np.int32)))
    edges = np.array([-np.inf, -1e30, np.nextafter(np.float32(-126), np.float32(-200)), 200, np.inf], np.float32)
    np.testing.assert_array_equal(arithmetic.exp2(edges), np.array([0, 0, 0, 2.0**126, 2.0**126], np.float32))


@BOTH
def test_activation_functions_match_their_definitions(arithmetic):
    x = np.linspace(-30, 30, 60_001).astype(np.float32)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(arithmetic.silu(x), exact / (1 + np.exp(-exact)), rtol=4e-6, atol=1e-30)
    tanh = np.tanh(math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3))
    np.testing.assert_allclose(arithmetic.gelu_tanh(x), 0.5 * exact * (1 + tanh), rtol=1e-5, atol=1e-6)
    far = np.array([-1e30, -200, 200, 1e30], np.float32)
    for act in (arithmetic.silu, arithmetic.gelu_tanh):
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(act(far), [0, 0, 200, 1e30], atol=1e-7)


def test_sine_and_cosine_are_the_nearest_float32(rng):
    angle = np.concatenate([np.arange(4096.0), rng.uniform(0, 1e6, 100_000)])
    sin, cos = sin_cos(angle)
    np.testing.assert_array_equal(sin, np.sin(angle).astype(np.float32))
    np.testing.assert_array_equal(cos, np.cos(angle).astype(np.float32))


def stands_for(x: Quantized):
    """The numbers that are multiplied in place of the activations, float64 [rows, k]."""
    return (x.q * x.d[..., None].astype(np.float64)).reshape(x.outliers.shape) + x.outliers


@BOTH
def test_activations_quantise_to_the_nearest_of_255_steps(rng, arithmetic):
    x = floats(rng, 6, 96, spread=2)
    x[1] = 0
    x[2] *= np.float32(1e-38)
    a = arithmetic.quantize(x)
    assert (a.q == np.rint(a.q)).all()
    assert np.abs(a.q).max() == 127
    assert not a.q[1:3].any()
    error = np.abs(stands_for(a) - x).reshape(6, 3, 32)
    assert (error <= a.d[..., None] * (0.5 + 1e-4) + 2.0**-100).all()
    np.testing.assert_array_equal(a.s, a.d * a.q.sum(axis=2))


@BOTH
def test_outliers_are_the_elements_above_three_and_a_half_times_the_root_mean_square(rng, arithmetic):
    x = floats(rng, 4, 320)
    x[0] = np.clip(x[0], -2, 2)  # none
    x[1, 70] = -40  # one
    x[2] /= 50
    x[2, 5::32] = [1, 1, 1, 1, 0.1, 1, 1, -1, 1, -1]  # in all blocks but one
    x[3] *= np.float32(2.0**-75)  # but none is below 2^-60
    x[3, 70:73] = np.float32(2.0**-59), -np.float32(2.0**-58), np.float32(2.0**-61)
    a = arithmetic.quantize(x)
    at = a.outliers != 0
    np.testing.assert_array_equal(at.sum(axis=1), [0, 1, 9, 2])
    root = np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
    np.testing.assert_array_equal(at, np.abs(x) > np.maximum(3.5 * root, 2.0**-60))
    np.testing.assert_array_equal(a.outliers[at], x[at])
    assert not a.q.reshape(4, 320)[at].any()


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_keeping_outliers_apart_halves_the_error_of_heavy_tailed_rows(rng, weight_bytes, kind):
    weight = RefWeight.from_bytes(kind, 64, 1024, weight_bytes(rng, kind, 64, 1024))
    w = weight.dequantize().astype(np.float64)
    x = rng.standard_t(2, (24, 1024)).astype(np.float32)
    blocks = x.reshape(24, 32, 32).astype(np.float64)
    d = np.abs(blocks).max(axis=2, keepdims=True) / 127
    plain = (np.rint(blocks / d) * d).reshape(24, 1024)
    assert 0 < (FUSED.quantize(x).outliers != 0).mean() < 0.03
    exact = x @ w.T
    without, apart = np.abs(plain @ w.T - exact).mean(), np.abs(FUSED.linear(x, weight) - exact).mean()
    assert apart < without / 2, (apart, without)


@BOTH
@pytest.mark.parametrize("kind", TYPES)
def test_linear_is_the_product_with_the_dequantised_weight(rng, weight_bytes, kind, arithmetic):
    rows, cols = 37, 512
    weight = RefWeight.from_bytes(kind, rows, cols, weight_bytes(rng, kind, rows, cols))
    x = floats(rng, 9, cols, spread=1)
    got = arithmetic.linear(x, weight)
    w = weight.dequantize().astype(np.float64)
    if isinstance(weight.content, np.ndarray):
        np.testing.assert_allclose(got, x @ w.T, rtol=0, atol=cols * 2e-7 * (np.abs(x) @ np.abs(w).T).max() / 10)
        return
    a = arithmetic.quantize(x)
    assert a.outliers.any()
    rounded = stands_for(a)
    np.testing.assert_allclose(got, rounded @ w.T, rtol=0, atol=3e-6 * (np.abs(rounded) @ np.abs(w).T).max())
    # against the unrounded product: half a step per activation at most, and far less in the mean
    bound = np.repeat(a.d / 2, 32, axis=1) @ np.abs(w).T
    error = np.abs(got - x @ w.T)
    assert (error <= bound * 1.01).all()
    assert error.mean() < bound.mean() / 5


@pytest.mark.parametrize("kind", ["F16", "Q4_K", "Q6_K"])
def test_linear_rows_do_not_depend_on_each_other(rng, weight_bytes, kind):
    weight = RefWeight.from_bytes(kind, 20, 256, weight_bytes(rng, kind, 20, 256))
    x = floats(rng, 7, 256)
    together = FUSED.linear(x, weight)
    for i in range(7):
        np.testing.assert_array_equal(FUSED.linear(x[i : i + 1], weight)[0], together[i])


def test_rms_norm_sums_in_sixteen_lanes(rng):
    x, w = floats(rng, 3, 2, 37), floats(rng, 37)
    got = Arithmetic(fused=False).rms_norm(x, w, 1e-5)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(got, exact, rtol=1e-6)
    for at in np.ndindex(3, 2):
        lanes = [np.float32(0)] * 16
        for k, value in enumerate(x[at]):
            lanes[k % 16] += value * value
        for half in (8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        r = np.float32(1) / np.sqrt(lanes[0] / np.float32(37) + np.float32(1e-5))
        np.testing.assert_array_equal(got[at], (x[at] * r) * w)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_each_pair_by_its_angle(rng, interleaved):
    x, angle = floats(rng, 5, 3, 8), rng.uniform(0, 1000, (5, 4))
    got = FUSED.rotate(x, *sin_cos(angle), interleaved)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    for i, (a, b) in enumerate(pairs):
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle[:, None, i])
        np.testing.assert_allclose(got[..., i], turned.real, atol=1e-6)
        np.testing.assert_allclose(got[..., i + 4], turned.imag, atol=1e-6)


def plain_attention(q, k, v, positions, origin, window):
    """Softmax attention in float64; q is in units of log 2."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for r, t in enumerate(positions):
        lo = max(0, t - window + 1) if window else 0
        for h in range(q.shape[1]):
            keys, values = (x[lo - origin : t + 1 - origin, h // group].astype(np.float64) for x in (k, v))
            p = np.exp2(keys @ q[r, h])
            out[r, h] = p @ values / p.sum()
    return out


@BOTH
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "first", "rows", "window"),
    [(2, 2, 64, 0, 20, None), (6, 2, 16, 507, 12, None), (7, 1, 32, 1030, 3, 600), (2, 1, 16, 515, 9, 5), (1, 1, 8, 1023, 2, 1)],
)
def test_attention_is_softmax(rng, heads, kv_heads, dim, first, rows, window, arithmetic):
    positions = np.arange(first, first + rows)
    origin = max(0, first - window + 1) if window else 0
    n = first + rows - origin
    q = bf16(floats(rng, rows, heads, dim) * np.float32(2 * dim**-0.5))
    k, v = bf16(floats(rng, n, kv_heads, dim)), bf16(floats(rng, n, kv_heads, dim))
    rounding = Rounding(KVFormat(), dim, arithmetic)
    pad = [(origin, 0), (0, 0), (0, 0)]  # NaN, which nobody sees
    k, v = (np.pad(x, pad, constant_values=np.nan) for x in (k, v))
    at = np.arange(origin + n)
    visible = (at <= positions[:, None]) & (at > positions[:, None] - (window or 10**9))
    got, _ = attention(rounding, q, rounding.keys(k, 1, 0), rounding.values(v), visible)
    want = plain_attention(q, k[origin:], v[origin:], positions, origin, window)
    np.testing.assert_allclose(got, want, atol=0.01)  # probabilities are bf16
    assert np.abs(got - want).mean() < 0.001


def test_merging_cuts_in_another_order_is_another_result(rng):
    rows = np.arange(50)
    cuts = [(floats(rng, 50, 2), np.abs(floats(rng, 50, 2)) + 1, floats(rng, 50, 2, 8)) for _ in range(3)]
    results = []
    for order in ((0, 1, 2), (1, 0, 2)):
        total = Softmax(FUSED, (50, 2, 8))
        for i in order:
            total.merge(rows, *cuts[i])
        results.append(total.result)
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
    assert (results[0] != results[1]).any()


STYLES = [
    {"interleaved": True},
    {"qkv_bias": True, "heads": 3, "kinds": ("Q4_0", "F16")},
    {"qk_norm": True, "style": "gemma", "windows": (7, None), "kinds": ("Q5_1", "BF16")},
]


@pytest.mark.parametrize("style", STYLES, ids=["llama", "qwen2", "gemma"])
def test_chunks_and_page_tables_do_not_change_a_bit(rng, tiny_model, pages, one_segment, style):
    model = tiny_model(3, **style)
    tokens = model.tokens(45)
    whole = model.reference(6).run(one_segment(tokens, pages(rng, 6).sequence(45, page=2), 0))
    for chunks in ((1,) * 45, (8, 16, 21), (44, 1), (3, 40, 2)):
        engine, table = model.reference(40), pages(rng, 40).sequence(45, page=4)
        at, rows = 0, []
        for n in chunks:
            rows.append(engine.run(one_segment(tokens[at : at + n], table, at)))
            at += n
        np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_sequences_in_one_step_do_not_meet(rng, tiny_model, pages, one_segment):
    model = tiny_model(4)
    sequences = [model.tokens(n) for n in (5, 12, 9)]
    pool = pages(rng, 30)
    tables = [pool.sequence(len(t)) for t in sequences]
    rows = np.cumsum([0, *map(len, sequences)])
    segments = [table.segment(int(row), len(t), 0) for table, row, t in zip(tables, rows, sequences, strict=False)]
    outputs = (rows[1:] - 1).astype(np.int32)
    together = model.reference(30).run(Batch(np.concatenate(sequences), segments, outputs))
    for tokens, table, got in zip(sequences, tables, together, strict=True):
        np.testing.assert_array_equal(model.reference(30).run(one_segment(tokens, table, 0))[-1], got)


def test_a_model_is_its_float64_formula(rng, tiny_model, pages, one_segment):
    """The interpreter wires a program as written: with float weights it is the plain formula but for bf16 attention operands."""
    model = tiny_model(5, kinds=("F32",), windows=(None,), interleaved=True)
    tokens, shape = model.tokens(10), model.shape
    w = {name: weight.dequantize().astype(np.float64) for name, weight in model.weights.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * model.vectors[name]

    x = w["embed"][tokens]
    y = norm(x, "0.norm")
    heads = (10, -1, shape.head_dim)
    q, k, v = ((y @ w[f"0.{n}"].T).reshape(heads) for n in "qkv")
    angle = np.arange(10)[:, None, None] * model.program.ropes[0]
    q, k = (((t[..., 0::2] + 1j * t[..., 1::2]) * np.exp(1j * angle)).view(np.float64) for t in (q, k))
    attended = plain_attention(q * shape.head_dim**-0.5 / math.log(2), k, v, range(10), 0, None)
    x = x + attended.reshape(10, -1) @ w["0.o"].T
    y = norm(x, "0.norm2")
    gate = y @ w["0.gate"].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w["0.up"].T)) @ w["0.down"].T
    want = norm(x, "norm") @ w["head"].T
    got = model.reference(4).run(one_segment(tokens, pages(rng, 4).sequence(10), 0))
    np.testing.assert_allclose(got, want, atol=0.03)
    assert np.abs(got - want).mean() < 0.004
