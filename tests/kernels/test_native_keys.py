"""Keys that are read back from the pool, beside those that the reference keeps."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.types import FRAME
from tokenmill.kernels.layout import KeyCalibration, KVFormat, KVLayout
from tokenmill.kernels.native import PackedWeight, Pool, variants
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.reference import Reference
from tokenmill.kernels.tape import Tape

pytestmark = pytest.mark.parametrize("variant", variants())
POSITIONS, FRAMES = 45, 40
GROUPS = (((0, 1), (1, 0)), ((0, 0), (1, 1)))


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def model(tiny_model):
    return tiny_model(3, heads=4, kv_heads=2, head_dim=80, hidden=64)


def layout(rng, model, key):
    size = (2, 2, 80)
    calibration = KeyCalibration(rng.uniform(0.1, 8, size).astype(np.float32), rng.uniform(-20, 20, size).astype(np.float32))
    return KVLayout(KVFormat(key, "int8", 64), GROUPS, (None, None), calibration if key != "bf16" else None)


def tape(model, variant, layout):
    pool = Pool(2, variant)
    weights = {name: PackedWeight.pack(*file, pool) for name, file in model.files.items()}
    made = Tape(model.program, weights, model.vectors, pool, POSITIONS, 1, FRAMES, layout)
    made.fill_kv(0xFF)
    return made


def prompt(model, tables):
    return Batch(model.tokens(POSITIONS), [Segment(0, POSITIONS, 0, tables)], np.array([0], np.int32))


@pytest.mark.parametrize("key", ["bf16", "int8", "int4"])
def test_keys_are_those_of_the_reference(rng, model, pages, variant, key):
    chosen, pool = layout(rng, model, key), pages(rng, FRAMES)
    tables = tuple(pool.sequence(POSITIONS, page=2).pages for _ in GROUPS)
    batch = prompt(model, tables)
    reference = Reference(model.program, model.weights, model.vectors, FRAMES, chosen, fused=variant != "portable")
    reference.run(batch)
    native = tape(model, variant, chosen)
    native.run(batch)
    want = np.empty((2, 2, POSITIONS, 80), np.float32)
    for (layer, head), group in chosen.group_of().items():
        stored = reference.keys[layer].take(slots(tables[group]), head)
        numbers = (stored.numbers * reference.rounding.spread(stored.scale))[:, 0]
        calibration = chosen.calibration
        want[layer, head] = numbers if calibration is None else numbers * calibration.factor[layer, head] + calibration.zero[layer, head]
    np.testing.assert_array_equal(native.keys(tables, POSITIONS), want)
    np.testing.assert_array_equal(native.keys(tables, 3), want[:, :, :3])


def slots(table):
    lengths = np.diff([*table.starts, -(-POSITIONS // FRAME)])
    frames = np.concatenate([np.arange(f, f + n) for f, n in zip(table.frames, lengths, strict=True)])
    return (frames[:, None] * FRAME + np.arange(FRAME)).ravel()[:POSITIONS]


def test_keys_that_are_not_there_are_refused(rng, model, variant):
    native = tape(model, variant, layout(rng, model, "bf16"))

    def table(frames, starts):
        return Pages(np.array(frames, np.int32), np.array(starts, np.int32))

    whole, hole, late, outside = table([0], [0]), table([0, -1, 10], [0, 2, 3]), table([0], [1]), table([FRAMES - 2], [0])
    for tables, why in (
        ((whole, hole), "frame 2 of the sequence is not there"),
        ((late, whole), "frame 0 of the sequence is not there"),
        ((whole, outside), "outside the pool"),
        ((whole,), "1 page tables, but 2 KV groups"),
    ):
        with pytest.raises(ValueError, match=why):
            native.keys(tables, POSITIONS)
    assert native.keys((whole, hole), 16).shape == (2, 2, 16, 80)


def test_keys_are_not_read_while_a_step_is_in_flight(rng, model, variant):
    native = tape(model, variant, layout(rng, model, "bf16"))
    tables = tuple(Pages(np.array([f], np.int32), np.array([0], np.int32)) for f in (0, 10))
    native.start(prompt(model, tables))
    with pytest.raises(RuntimeError):
        native.keys(tables, 8)
    native.finish()
