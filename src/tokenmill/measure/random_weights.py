"""Weights for benchmarks: any form, any shape, no file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import ConfigError
from tokenmill.kernels.native import PackedWeight, Pool
from tokenmill.weights.tensor import LAYOUTS

U8 = npt.NDArray[np.uint8]

FORMS = tuple(LAYOUTS)
QUANTISED = tuple(name for name, layout in LAYOUTS.items() if layout.block > 1)

_SCALES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
"""Bytes of a block at which its float16 numbers lie; 0 in the other quantised forms."""


def check_form(form: str, option: str) -> str:
    """The form, or `ConfigError` listing those that exist."""
    if form not in LAYOUTS:
        raise ConfigError(f"{option}: there is no weight form {form!r}; there are {', '.join(LAYOUTS)}", param=option)
    return form


def fits(form: str, cols: int) -> bool:
    """Whether rows of `cols` are whole blocks."""
    return cols % LAYOUTS[form].block == 0


def random_bytes(form: str, rows: int, cols: int, rng: np.random.Generator) -> U8:
    """File bytes of finite weights; dense ones are normally distributed."""
    layout = LAYOUTS[form]
    if layout.block == 1:
        numbers = rng.standard_normal(rows * cols, np.float32)
        match form:
            case "F16":
                return numbers.astype(np.float16).view(np.uint8)
            case "BF16":
                return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return numbers.view(np.uint8)
    blocks = rng.integers(0, 256, (rows * cols // layout.block, layout.size), np.uint8)
    for at in _SCALES.get(form, (0,)):
        blocks[:, at : at + 2] = np.full(len(blocks), 2**-8, np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def pack_copies(form: str, rows: int, cols: int, copies: int, pool: Pool, rng: np.random.Generator) -> list[PackedWeight]:
    """Equal weights in memory of their own each, so that using one does not bring the others into a cache."""
    data = random_bytes(form, rows, cols, rng)
    return [PackedWeight.pack(form, rows, cols, data, pool) for _ in range(copies)]
