"""What a broken model file or a wrong batch can do to the native tape: give NaN or a ValueError, never a crash or another's numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tokenmill.kernels.native import PackedWeight, Pool, variants
from tokenmill.kernels.ops import Attention, Batch, Buffer, Embed, Heads, Linear, Pages, Program, RotateAndStore, Segment, Select
from tokenmill.kernels.reference import Reference
from tokenmill.kernels.reference_weights import TYPES, RefWeight
from tokenmill.kernels.tape import Tape

pytestmark = pytest.mark.parametrize("variant", variants())


@pytest.fixture
def rng():
    return np.random.default_rng(17)


def tape_of(model, pool, rows, n_frames):
    weights = {name: PackedWeight.pack(*file, pool) for name, file in model.files.items()}
    return Tape(model.program, weights, model.vectors, pool, rows, rows, n_frames)


@pytest.mark.parametrize("kind", TYPES)
def test_random_weight_bits_give_numbers_or_nan_as_the_reference_does(rng, tiny_model, pages, one_segment, variant, kind):
    """Any bits: infinite and NaN scales among them. What is NaN is NaN for every batch, and the rest is right to the bit."""
    sizes = {"hidden": 256, "inner": 256, "heads": 4} if kind.endswith("_K") else {}
    model = tiny_model(30, kinds=(kind,), **sizes)
    for name, (_, rows, cols, data) in list(model.files.items()):
        if name in ("0.o", "1.down", "head"):
            broken = data.copy()
            hit = rng.random(len(data)) < 0.3
            broken[hit] = rng.integers(0, 256, hit.sum())
            model.files[name] = (kind, rows, cols, broken)
    step = one_segment(model.tokens(19), pages(rng, 6).sequence(19), 0)
    with np.errstate(all="ignore"):
        want = model.reference(6, fused=variant != "portable").run(step)
    got = tape_of(model, Pool(2, variant), 19, 6).run(step)
    np.testing.assert_array_equal(got, want)
    assert not np.isfinite(want).all()


@pytest.mark.parametrize("kind", [t for t in TYPES if t[0] == "Q"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_row_with_a_number_that_is_none_is_nan_and_the_others_keep_their_bits(rng, weight_bytes, variant, kind, value):
    k, outputs = 512, 33
    x = rng.standard_normal((9, k)).astype(np.float32)
    x[3] *= 1e30  # the sum of squares overflows, the numbers do not
    x[5, 2 * rng.integers(k // 2)] = value
    qx, last, out = Buffer("x", k), Buffer("last", k, "outputs"), Buffer("out", outputs, "outputs")
    program = Program(Heads(1, 1, 64), layers=0, ops=[Embed("input", qx), Select(qx, last), Linear(last, ("w",), out)])
    files = {"input": ("F32", *x.shape, x.reshape(-1).view(np.uint8)), "w": (kind, outputs, k, weight_bytes(rng, kind, outputs, k))}
    pool, table = Pool(1, variant), np.zeros(1, np.int32)
    tape = Tape(program, {n: PackedWeight.pack(*f, pool) for n, f in files.items()}, {}, pool, 9, 9, 2)
    reference = Reference(program, {n: RefWeight.from_bytes(*f) for n, f in files.items()}, {}, 0, fused=variant != "portable")
    for chosen in (np.arange(9), np.array([5]), np.array([4, 5])):
        step = Batch(chosen.astype(np.int32), [Segment(0, len(chosen), 0, (Pages(table, table),))], np.arange(len(chosen), dtype=np.int32))
        got = tape.run(step)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(got, reference.run(step))
        assert np.isnan(got[chosen == 5]).all()
        assert np.isfinite(got[chosen != 5]).all()


class Overflowing:
    """Attention over 700 positions whose vectors are moderate, but for the key and the query (not the value) of one."""

    def __init__(self, rng, at, size):
        self.heads = Heads(2, 1, 64)
        self.qkv = rng.standard_normal((700, 256)).astype(np.float32)
        self.qkv[at, :192] *= np.float32(size)
        self.identity = np.eye(128, dtype=np.float32)
        qkv, attended = Buffer("qkv", 256), Buffer("attended", 128)
        last, out = Buffer("last", 128, "outputs"), Buffer("out", 128, "outputs")
        ops = [Embed("qkv", qkv), RotateAndStore(qkv, 0, self.heads, 0, 0.125 / math.log(2)), Attention(0, self.heads, attended)]
        ops += [Select(attended, last), Linear(last, ("identity",), out)]
        self.program = Program(self.heads, 1, ops, [1e4 ** -(np.arange(32) / 32)])
        matrices = {"qkv": self.qkv, "identity": self.identity}
        self.files = {name: ("F32", *x.shape, x.reshape(-1).view(np.uint8)) for name, x in matrices.items()}
        self.vectors = {}


@pytest.mark.parametrize("at", [0, 515])
@pytest.mark.parametrize("size", [1e20, 1e38, np.inf, np.nan])
def test_scores_that_overflow_make_nan_of_the_rows_that_see_them(rng, pages, one_segment, variant, at, size):
    model = Overflowing(rng, at, size)
    table, tokens = pages(rng, 100).sequence(700), np.arange(700, dtype=np.int32)
    got = tape_of(model, Pool(2, variant), 700, 100).run(one_segment(tokens, table, 0)).copy()
    assert np.isfinite(got[:at]).all()
    assert not np.isfinite(got[at]).all()
    # one row after the other: the same numbers, and NaN in the same places
    single = tape_of(model, Pool(3, variant), 700, 100)
    single.run(one_segment(tokens[:at], table, 0)) if at else None
    for t in (at, at + 1, at + 2):
        np.testing.assert_array_equal(single.run(one_segment(tokens[t : t + 1], table, t))[0], got[t])


def with_first(batch, **changes):
    return replace(batch, segments=[batch.segments[0]._replace(**changes), *batch.segments[1:]])


def with_pages(batch, **changes):
    return with_first(batch, pages=(batch.segments[0].pages[0]._replace(**changes),))


def extents(frames, starts):
    return {"frames": np.array(frames, np.int32), "starts": np.array(starts, np.int32)}


BAD = {
    "more rows than the tape holds": lambda b: Batch(np.zeros(33, np.int32), [b.segments[0]._replace(rows=33)], b.outputs),
    "more outputs than the tape holds": lambda b: replace(b, outputs=np.zeros(33, np.int32)),
    "an output after the last row": lambda b: replace(b, outputs=np.array([20], np.int32)),
    "an output before the first row": lambda b: replace(b, outputs=np.array([-1], np.int32)),
    "a token after the vocabulary": lambda b: replace(b, tokens=b.tokens + np.int32(80)),
    "a token before the vocabulary": lambda b: replace(b, tokens=b.tokens - np.int32(80)),
    "a segment that misses rows": lambda b: with_first(b, rows=19),
    "a segment with rows too many": lambda b: with_first(b, rows=21),
    "a segment with rows without number": lambda b: with_first(b, rows=2**31 - 1),
    "a segment of no rows": lambda b: with_first(b, rows=0),
    "a segment that starts elsewhere": lambda b: with_first(b, row=1),
    "a negative position": lambda b: with_first(b, position=-1),
    "a position after the pages": lambda b: with_first(b, position=300),
    "the last position of all": lambda b: with_first(b, position=2**31 - 1),
    "no pages": lambda b: with_pages(b, frames=b.tokens[:0], starts=b.tokens[:0]),
    "frames without starts": lambda b: with_pages(b, starts=b.tokens[:0]),
    "a frame after the pool": lambda b: with_pages(b, frames=b.segments[0].pages[0].frames + np.int32(20)),
    "a frame before the pool": lambda b: with_pages(b, frames=b.segments[0].pages[0].frames - np.int32(30)),
    "an extent that leaves the pool": lambda b: with_pages(b, **extents([18], [0])),
    "extents out of order": lambda b: with_pages(b, **extents([0, 1, 2], [0, 2, 1])),
    "pages that begin late": lambda b: with_pages(with_first(b, position=40), **extents([0], [4])),
    "a hole where a row writes": lambda b: with_pages(b, **extents([0, -1, 2], [0, 1, 2])),
    "a hole where the last row writes": lambda b: with_pages(b, **extents([0, -1], [0, 2])),
    "a negative frame that is no hole": lambda b: with_pages(with_first(b, position=24), **extents([-2, 3], [0, 3])),
    "no page tables": lambda b: with_first(b, pages=()),
    "a page table too many": lambda b: with_first(b, pages=b.segments[0].pages * 2),
    "weights that are not there": lambda b: with_first(b, weigh=0),
    "weights out of order": lambda b: replace(with_first(b, weigh=1), weights=(np.zeros((2, 3), np.int64),) * 2),
    "weights of fewer frames": lambda b: replace(with_first(b, weigh=0), weights=(np.zeros((2, 2), np.int64),)),
    "weights of fewer heads": lambda b: replace(with_first(b, weigh=0), weights=(np.zeros((1, 3), np.int64),)),
}


@pytest.mark.parametrize("case", BAD)
def test_a_batch_that_does_not_fit_is_refused_and_leaves_the_tape_as_it_was(rng, tiny_model, pages, one_segment, variant, case):
    model = tiny_model(31)
    tape = tape_of(model, Pool(2, variant), 32, 20)
    tokens, table = model.tokens(22), pages(rng, 20).sequence(22)
    good = one_segment(tokens[:20], table, 0)
    whole = tape.run(one_segment(tokens, table, 0)).copy()
    tape.run(good)
    with pytest.raises(ValueError, match=r"\[tape\]"):
        tape.run(BAD[case](good))
    np.testing.assert_array_equal(tape.run(one_segment(tokens[20:], table, 20)), whole[20:])


def test_a_pool_needs_a_thread(variant):
    with pytest.raises(ValueError, match="at least one thread"):
        Pool(-1, variant)


@pytest.mark.parametrize("kind", TYPES)
def test_bytes_that_do_not_fit_the_shape_are_refused(weight_bytes, rng, variant, kind):
    data, pool = weight_bytes(rng, kind, 3, 256), Pool(2, variant)
    shapes = [(3, 512), (2, 256), (0, 256), (-3, 256), (3, 0), (3, -256), (2**31 - 1, 2**31 - 256)]
    if kind[0] == "Q":
        shapes += [(3, 240), (3, 257)]
    for rows, cols in shapes:
        with pytest.raises(ValueError, match="pack"):
            PackedWeight.pack(kind, rows, cols, data, pool)
    with pytest.raises(ValueError, match="pack"):
        PackedWeight.pack(kind, 3, 256, data[:-1], pool)
