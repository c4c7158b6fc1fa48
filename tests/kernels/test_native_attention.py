"""Rotation, paged KV and attention of every native variant against the reference, to the last bit, over hostile memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tokenmill.kernels.native import PackedWeight, Pool, variants
from tokenmill.kernels.ops import Attention, Batch, Buffer, Embed, Heads, Linear, Program, RotateAndStore, Select
from tokenmill.kernels.reference import Reference
from tokenmill.kernels.reference_weights import RefWeight
from tokenmill.kernels.tape import Tape

pytestmark = pytest.mark.parametrize("variant", variants())


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@dataclass(frozen=True)
class Layer:
    """One attention layer over chosen q, k and v: token t's are row t of the float embedding."""

    qkv: np.ndarray
    shape: Heads
    window: int | None = None
    interleaved: bool = False
    norms: bool = False

    def program(self, *, attend=True):
        s = self.shape
        qkv, attended = Buffer("qkv", self.qkv.shape[1]), Buffer("attended", s.heads * s.head_dim)
        norms = {"q_norm": "q_norm", "k_norm": "k_norm", "eps": 1e-6} if self.norms else {}
        scale = s.head_dim**-0.5 / math.log(2)
        ops = [Embed("qkv", qkv), RotateAndStore(qkv, 0, s, 0, scale, self.interleaved, **norms)]
        if attend:
            last, out = Buffer("last", attended.width, "outputs"), Buffer("out", attended.width, "outputs")
            ops += [Attention(0, s, attended, self.window), Select(attended, last), Linear(last, ("identity",), out)]
        ropes = [1e4 ** -(np.arange(s.head_dim // 2) * 2.0 / s.head_dim)]
        return Program(s, 1, ops, ropes)

    @property
    def vectors(self):
        n = self.shape.head_dim
        return {"q_norm": np.linspace(0.5, 2, n, dtype=np.float32), "k_norm": np.linspace(2, -1, n, dtype=np.float32)} if self.norms else {}

    @property
    def files(self):
        """The identity shows what attention gave: a linear op with it changes no bit."""
        matrices = {"qkv": self.qkv, "identity": np.eye(self.shape.heads * self.shape.head_dim, dtype=np.float32)}
        return {name: ("F32", *x.shape, x.reshape(-1).view(np.uint8)) for name, x in matrices.items()}

    def reference(self, variant, n_frames, *, attend=True):
        weights = {name: RefWeight.from_bytes(*file) for name, file in self.files.items()}
        return Reference(self.program(attend=attend), weights, self.vectors, n_frames, fused=variant != "portable")

    def tape(self, pool, rows, n_frames):
        weights = {name: PackedWeight.pack(*file, pool) for name, file in self.files.items()}
        tape = Tape(self.program(), weights, self.vectors, pool, rows, rows, n_frames)
        tape.fill_kv(0xFF)  # NaN everywhere
        return tape


def random_layer(rng, positions, heads, kv_heads, dim, size=2.0, **kinds):
    qkv = rng.standard_normal((positions, (heads + 2 * kv_heads) * dim)) * size
    return Layer(qkv.astype(np.float32), Heads(heads, kv_heads, dim), **kinds)


def step(*parts):
    """A step over (table, first position, rows, first token) of several sequences that wants every row."""
    row, segments, tokens = 0, [], []
    for table, position, rows, token in parts:
        segments.append(table.segment(row, rows, position))
        tokens.append(np.arange(token, token + rows, dtype=np.int32))
        row += rows
    return Batch(np.concatenate(tokens), segments, np.arange(row, dtype=np.int32))


CASES = [
    # heads, kv heads, head dim, positions, rows of the last step, window, further
    (1, 1, 64, 40, 40, None, {}),
    (3, 1, 80, 530, 21, None, {}),
    (7, 1, 64, 1100, 17, 600, {"interleaved": True}),
    (6, 2, 96, 515, 8, 5, {"norms": True}),
    (2, 2, 128, 1025, 3, 1, {}),
    (4, 1, 256, 520, 9, 512, {"norms": True, "interleaved": True}),
    (3, 3, 64, 2100, 1, None, {}),
    (14, 2, 64, 700, 2, 300, {"size": 30.0}),
    (2, 1, 16, 1537, 30, 1024, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}x{c[2]}-{c[3]}")
def test_attention_has_the_reference_bits(rng, pages, variant, case):
    heads, kv_heads, dim, positions, rows, window, kinds = case
    layer = random_layer(rng, positions, heads, kv_heads, dim, window=window, **kinds)
    n_frames = positions // 8 * 2 + 9
    table = pages(rng, n_frames).sequence(positions)
    tape = layer.tape(Pool(2, variant), positions, n_frames)
    before = positions - rows
    reference = layer.reference(variant, n_frames)
    if before:
        first = step((table, 0, before, 0))
        tape.run(first)
        # the reference stores the earlier keys and values without attending
        store = layer.reference(variant, n_frames, attend=False)
        store.run(first)
        reference.keys, reference.values = store.keys, store.values
    last = step((table, before, rows, before))
    want = reference.run(last)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(tape.run(last), want)


def test_sequences_of_one_step_have_the_reference_bits_each(rng, pages, variant):
    """Prefill and decode side by side, in shuffled pages of one pool."""
    lengths, rows = (601, 40, 513, 9, 530), (1, 23, 5, 1, 1)
    layer = random_layer(rng, sum(lengths), 4, 2, 64, window=520)
    pool = pages(rng, 300)
    tables = [pool.sequence(n, page=4) for n in lengths]
    tokens = np.cumsum([0, *lengths[:-1]])
    befores = [(t, 0, n - r, int(k)) for t, n, r, k in zip(tables, lengths, rows, tokens, strict=True)]
    store, reference = layer.reference(variant, 300, attend=False), layer.reference(variant, 300)
    tape = layer.tape(Pool(2, variant), sum(lengths), 300)
    store.run(step(*befores))
    reference.keys, reference.values = store.keys, store.values
    tape.run(step(*befores))
    last = step(*((t, n, r, k + n) for (t, _, n, k), r in zip(befores, rows, strict=True)))
    np.testing.assert_array_equal(tape.run(last), reference.run(last))


@pytest.mark.parametrize(("window", "threads"), [(None, 1), (None, 2), (100, 3), (513, 2)])
def test_decode_and_chunks_have_the_bits_of_one_prefill(rng, pages, variant, window, threads):
    positions = 1060
    layer = random_layer(rng, positions, 3, 1, 64, window=window)
    whole = layer.tape(Pool(1, variant), positions, 200).run(step((pages(rng, 200).sequence(positions), 0, positions, 0))).copy()
    for chunks in ([480] + [1] * 580, [1000, 60], list(rng.multinomial(positions, [1 / 40] * 40))):
        tape = layer.tape(Pool(threads, variant), positions, 300)
        table = pages(rng, 300).sequence(positions, page=int(rng.choice([1, 2, 8])))
        at = 0
        for rows in (int(n) for n in chunks if n):
            got = tape.run(step((table, at, rows, at)))
            np.testing.assert_array_equal(got, whole[at : at + rows])
            at += rows


def test_a_window_off_by_one_is_seen(rng, pages, variant):
    layer = random_layer(rng, 60, 1, 1, 64, window=20)
    table = pages(rng, 20).sequence(60)
    got = layer.tape(Pool(1, variant), 60, 20).run(step((table, 0, 60, 0))).copy()
    for wrong in (19, 21):
        other = replace(layer, window=wrong).reference(variant, 20).run(step((table, 0, 60, 0)))
        np.testing.assert_array_equal(got[:19], other[:19])
        assert (got[21:] != other[21:]).any(axis=1).all()


def test_merging_cuts_in_another_order_is_seen(rng, pages, variant):
    layer = random_layer(rng, 1600, 2, 1, 64)
    table = pages(rng, 210).sequence(1600)
    tape = layer.tape(Pool(1, variant), 1600, 210)
    first, last = step((table, 0, 1590, 0)), step((table, 1590, 10, 1590))
    tape.run(first)
    store, reference = layer.reference(variant, 210, attend=False), layer.reference(variant, 210)
    store.run(first)
    reference.keys, reference.values = store.keys, store.values
    got, want = tape.run(last).copy(), reference.run(last)
    np.testing.assert_array_equal(got, want)
    # the same positions with the second and third cut exchanged: same softmax, another order
    order = np.concatenate([np.arange(512), np.arange(1024, 1536), np.arange(512, 1024), np.arange(1536, 1600)])
    frame = np.zeros(200, np.int32)
    for start, first_frame, end in zip(table.starts, table.frames, [*table.starts[1:], 200], strict=True):
        frame[start:end] = np.arange(first_frame, first_frame + end - start)
    slots = np.repeat(frame, 8) * 8 + np.tile(np.arange(8), 200)
    for kv in (reference.keys[0].numbers, reference.values[0].numbers):
        kv[slots] = kv[slots[order]]
    exchanged = reference.run(last)
    np.testing.assert_allclose(exchanged, want, atol=1e-4)
    assert (exchanged != want).any()
