"""A weight as it lies in its file: a name, a type, two extents and the raw bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Layout(NamedTuple):
    """`block` consecutive weights of a row are stored in `size` bytes."""

    block: int
    size: int


LAYOUTS: dict[str, Layout] = {
    "F32": Layout(1, 4),
    "F16": Layout(1, 2),
    "BF16": Layout(1, 2),
    "Q4_0": Layout(32, 18),
    "Q4_1": Layout(32, 20),
    "Q5_0": Layout(32, 22),
    "Q5_1": Layout(32, 24),
    "Q8_0": Layout(32, 34),
    "Q4_K": Layout(256, 144),
    "Q5_K": Layout(256, 176),
    "Q6_K": Layout(256, 210),
}
"""Every type that can be read, by GGUF's name for it."""


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """One tensor of a model file.

    rows: outputs (the product of all but the contiguous dimension; 1 for a vector). cols: the contiguous
    dimension, inputs of a linear layer. data: read-only uint8[rows * row_bytes], a view of the mapped file.
    """

    name: str
    type: str
    rows: int
    cols: int
    data: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        block = LAYOUTS[self.type].block
        assert self.cols % block == 0, f"{self.name}: {self.cols} columns are not whole {self.type} blocks of {block}"
        assert self.data.size == self.rows * self.row_bytes, f"{self.name}: {self.data.size} bytes, {self.rows} x {self.cols} {self.type}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        layout = LAYOUTS[self.type]
        return self.cols // layout.block * layout.size
