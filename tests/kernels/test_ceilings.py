from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from tokenmill import _native
from tokenmill.kernels.ceilings import multiply_bf16, multiply_int8, read
from tokenmill.kernels.native import Pool, variants
from tokenmill.measure.timing import measure_ceilings


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("loop", [multiply_int8, multiply_bf16])
def test_operations_grow_with_rounds_and_threads_and_take_time(loop: Callable[[Pool, int], float], variant: str) -> None:
    one, two = Pool(1, variant), Pool(2, variant)
    assert loop(one, 1000) == 1000 * loop(one, 1) > 0
    assert loop(two, 1000) == 2 * loop(one, 1000)
    # A loop that the compiler saw through would take no time at all.
    before = time.thread_time()
    operations = loop(one, 20_000)
    assert operations / (time.thread_time() - before) < 1e13


@pytest.mark.parametrize("variant", variants())
def test_reading_reads_every_byte(variant: str) -> None:
    data = np.zeros(3 << 20, np.uint8)
    pool = Pool(2, variant)
    assert _native.run_read(pool.native, variant, data) == 0
    for at in (*range(0, 256, 8), 1 << 20, len(data) - 1):
        data[at] = 1
        assert _native.run_read(pool.native, variant, data) != 0, f"byte {at} was not read"
        data[at] = 0
    assert read(pool, data) == len(data)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="variant 'sse9'"):
        _native.run_int8(Pool(1).native, "sse9", 1)


def test_a_machine_has_ceilings() -> None:
    ceilings = measure_ceilings(Pool(1))
    assert 1e8 < ceilings.read < 1e13
    assert 1e8 < ceilings.bf16 <= ceilings.int8 < 1e15
