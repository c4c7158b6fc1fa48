"""Whole tiny random models: the native tape has the reference's logits, whatever the batch, chunks, pages and threads."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.kernels.native import PackedWeight, Pool, default_variant, variants
from tokenmill.kernels.ops import Batch
from tokenmill.kernels.tape import Tape

STYLES = {
    "llama": {"interleaved": True, "kinds": ("Q4_1", "Q5_0", "Q8_0"), "heads": 3},
    "llama-k": {"hidden": 256, "inner": 512, "heads": 4, "kv_heads": 2, "kinds": ("Q4_K", "Q6_K", "Q5_K"), "interleaved": True},
    "qwen2": {"qkv_bias": True, "heads": 7, "kinds": ("Q4_0", "Q5_1", "F16"), "inner": 160},
    "qwen3": {"qk_norm": True, "head_dim": 128, "kinds": ("BF16",)},
    "gemma": {"qk_norm": True, "style": "gemma", "windows": (7, 33, None), "head_dim": 80, "kinds": ("Q8_0", "F32")},
}

every_style = pytest.mark.parametrize("style", STYLES)


@pytest.fixture
def rng():
    return np.random.default_rng(13)


def tape_of(model, pool, rows, n_frames):
    weights = {name: PackedWeight.pack(*file, pool) for name, file in model.files.items()}
    tape = Tape(model.program, weights, model.vectors, pool, rows, rows, n_frames)
    tape.fill_kv(0xFF)  # NaN everywhere
    return tape


@every_style
@pytest.mark.parametrize("variant", variants())
def test_logits_are_the_reference_bits(rng, tiny_model, pages, one_segment, variant, style):
    model = tiny_model(20, **STYLES[style])
    step = one_segment(model.tokens(53), pages(rng, 9).sequence(53, page=2), 0)
    want = model.reference(9, fused=variant != "portable").run(step)
    assert np.ptp(want) > 1
    np.testing.assert_array_equal(tape_of(model, Pool(2, variant), 53, 9).run(step), want)


@every_style
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_random_schedule_gives_every_sequence_its_own_bits(tiny_model, pages, one_segment, variant, style, threads):
    """Sequences join, advance by random chunks in shuffled order, wait and finish; each has the logits of its run alone."""
    model = tiny_model(21, **STYLES[style])
    rng = np.random.default_rng(threads)
    pool = pages(rng, 160)
    sequences = [model.tokens(int(n)) for n in rng.integers(1, 100, 7)]
    alone_tape = tape_of(model, Pool(1, variant), 128, 20)
    alone = [alone_tape.run(one_segment(t, pages(rng, 20).sequence(len(t), page=1), 0)).copy() for t in sequences]
    tables = [pool.sequence(len(t)) for t in sequences]
    tape = tape_of(model, Pool(threads, variant), 64, 160)
    done = [0] * len(sequences)
    while any(at < len(t) for at, t in zip(done, sequences, strict=True)):
        row, segments, tokens, expected = 0, [], [], []
        for i in rng.permutation(len(sequences)):
            rows = min(int(rng.choice([0, 1, 1, 3, 8, 30])), len(sequences[i]) - done[i], 64 - row)
            if rows == 0:
                continue
            now = slice(done[i], done[i] + rows)
            segments.append(tables[i].segment(row, rows, done[i]))
            tokens.append(sequences[i][now])
            expected.append(alone[i][now])
            row, done[i] = row + rows, done[i] + rows
        if row:
            outputs = rng.permutation(row).astype(np.int32)[: rng.integers(1, row + 1)]
            got = tape.run(Batch(np.concatenate(tokens), segments, outputs))
            np.testing.assert_array_equal(got, np.concatenate(expected)[outputs])


def test_a_step_may_want_no_logits(tiny_model, pages, one_segment, rng):
    model = tiny_model(22)
    tokens, table = model.tokens(20), pages(rng, 4).sequence(20)
    tape = tape_of(model, Pool(2, default_variant()), 20, 4)
    first = one_segment(tokens[:12], table, 0)
    assert tape.run(Batch(first.tokens, first.segments, np.empty(0, np.int32))).shape == (0, model.shape.vocab)
    rest = tape.run(one_segment(tokens[12:], table, 12)).copy()
    np.testing.assert_array_equal(rest, tape.run(one_segment(tokens, table, 0))[12:])


def test_memory_is_shared_by_sequences_with_a_common_prefix(tiny_model, pages, rng):
    """Two page tables that name the same frames read the same keys and values."""
    model = tiny_model(23)
    pool = pages(rng, 20)
    prefix, tails = model.tokens(16), (model.tokens(5), model.tokens(9))
    tape = tape_of(model, Pool(2, default_variant()), 64, 20)
    shared = pool.sequence(16, page=1)
    tables = []
    for tail in tails:
        own = pool.sequence(len(tail), page=2)
        tables.append(type(own)(np.concatenate([shared.frames, own.frames]), np.concatenate([shared.starts, own.starts + 2])))
    none = np.empty(0, np.int32)
    tape.run(Batch(prefix, [shared.segment(0, 16, 0)], none))
    both = Batch(np.concatenate(tails), [tables[0].segment(0, 5, 16), tables[1].segment(5, 9, 16)], np.arange(14, dtype=np.int32))
    got = tape.run(both).copy()
    for tail, part in zip(tails, (got[:5], got[5:]), strict=True):
        table = pages(rng, 20).sequence(16 + len(tail))
        whole = np.concatenate([prefix, tail])
        alone = tape_of(model, Pool(1, default_variant()), 64, 20)
        step = Batch(whole, [table.segment(0, len(whole), 0)], np.arange(16, len(whole), dtype=np.int32))
        np.testing.assert_array_equal(alone.run(step), part)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "F16"])
def test_rows_in_pairs_and_rows_in_halves_give_the_same_bits(rng, tiny_model, pages, one_segment, variant, kind):
    """GGUF files of llama models keep the pair (i, i + head_dim/2) of q and k in rows 2i and 2i + 1."""
    shape = {"hidden": 256, "inner": 256, "heads": 8, "kv_heads": 2, "kinds": (kind,), "qkv_bias": True, "windows": (None, 9)}
    halves, pairs = tiny_model(24, **shape), tiny_model(24, interleaved=True, **shape)

    def in_pairs(x, heads):
        return x.reshape(heads, 2, 32, -1).swapaxes(1, 2).reshape(x.shape)

    for layer in range(2):
        for name, heads in (("q", 8), ("k", 2)):
            _, rows, cols, data = halves.files[f"{layer}.{name}"]
            pairs.files[f"{layer}.{name}"] = (kind, rows, cols, in_pairs(data.reshape(rows, -1), heads).reshape(-1))
        q, k, v = np.split(halves.vectors[f"{layer}.bias"], (512, 640))
        pairs.vectors[f"{layer}.bias"] = np.concatenate([in_pairs(q, 8), in_pairs(k, 2), v])
    tokens, table = halves.tokens(37), pages(rng, 9).sequence(37)
    step, last = one_segment(tokens[:36], table, 0), one_segment(tokens[36:], table, 36)
    one, other = (tape_of(model, Pool(2, variant), 36, 9) for model in (halves, pairs))
    np.testing.assert_array_equal(one.run(step), other.run(step))
    np.testing.assert_array_equal(one.run(last), other.run(last))
    pairs.files = halves.files
    assert (tape_of(pairs, Pool(1, variant), 36, 9).run(step) != one.run(step)).any()
