"""Loops that do one thing as fast as this machine can; whoever times them has what no kernel can exceed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill import _native
from tokenmill.kernels.native import Pool


def multiply_int8(pool: Pool, rounds: int) -> float:
    """Byte dot products in registers, on all threads, with the variant's instructions; returns the operations done."""
    return _native.run_int8(pool.native, pool.variant, rounds)


def multiply_bf16(pool: Pool, rounds: int) -> float:
    """The same of bf16 pairs; variants without such an instruction multiply and add in float32, as their kernels do."""
    return _native.run_bf16(pool.native, pool.variant, rounds)


def read(pool: Pool, data: npt.NDArray[np.uint8]) -> int:
    """Read all of `data` (uint8 [n]) once, on all threads; returns the bytes read."""
    _native.run_read(pool.native, pool.variant, data)
    return data.nbytes
