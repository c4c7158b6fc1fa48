"""Weights of 4 bits out of wider ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tokenmill.kernels.native import PackedWeight, Pool

F32 = npt.NDArray[np.float32]


def dense(values: F32, pool: Pool) -> PackedWeight:
    return PackedWeight.pack("F32", *values.shape, np.ascontiguousarray(values).view(np.uint8).ravel(), pool)


def error(values: F32, other: F32) -> float:
    return float(np.sqrt(np.mean((values - other) ** 2) / np.mean(values**2)))


def to_the_extreme(values: F32) -> F32:
    """With scales by which each block of 32's extreme value is hit: what there is without a search."""
    blocks = values.reshape(-1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = (extreme / -8).astype(np.float16).astype(np.float32)
    return (np.clip(np.rint(blocks / scale), -8, 7) * scale).reshape(values.shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"])
def test_every_form_is_narrowed_to_what_it_nearly_was(kind: str, weight_bytes: Callable[..., npt.NDArray[np.uint8]]) -> None:
    pool, rng = Pool(2), np.random.default_rng(3)
    wide = PackedWeight.pack(kind, 40, 512, weight_bytes(rng, kind, 40, 512), pool)
    narrow = wide.narrow(pool)
    assert (narrow.form, narrow.rows, narrow.cols) == ("Q4_0", 40, 512)
    values = wide.dequantize()
    assert error(values, narrow.dequantize()) < 0.12


def test_scales_are_better_than_those_that_hit_the_extreme() -> None:
    pool, values = Pool(2), np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)
    narrow = dense(values, pool).narrow(pool).dequantize()
    weighted = np.abs(values)  # large values count more
    found, simple = (np.sum((weighted * (values - other)) ** 2) for other in (narrow, to_the_extreme(values)))
    assert found < 0.9 * simple


def test_what_four_bits_hold_stays() -> None:
    """Sixteen levels times a power of two, zeros among them and a block of nothing else."""
    pool, rng = Pool(2), np.random.default_rng(2)
    levels = rng.integers(-8, 8, (20, 96)).astype(np.float32)
    levels[:, ::32] = -8  # the extreme that tells the scale
    levels[3, 32:64] = 0
    values = levels * np.float32(0.125)
    assert np.array_equal(dense(values, pool).narrow(pool).dequantize(), values)


def test_columns_come_in_blocks() -> None:
    pool = Pool(1)
    with pytest.raises(ValueError, match="multiples of 32, not 48"):
        dense(np.ones((4, 48), np.float32), pool).narrow(pool)
