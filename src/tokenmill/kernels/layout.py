"""How keys and values are kept: the format of a frame, and which (layer, kv head) pairs share page tables.

The bytes themselves are the business of native/include/page_format.h; docs/numerics.md says what a format does to the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenmill.core.kv_spelling import Format
from tokenmill.core.types import FRAME, KVType, Pair, Streaming
from tokenmill.kernels.ops import Program

BITS: dict[KVType, int] = {"bf16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class KVFormat:
    """What keys and values are rounded to. `group_size` channels of a head share a scale, or all if the head has fewer.

    Raises ValueError if group_size is not a multiple of 32.
    """

    key: KVType = "bf16"
    value: KVType = "bf16"
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.group_size < 32 or self.group_size % 32:
            raise ValueError(f"group_size is {self.group_size}, but must be a multiple of 32")

    def __str__(self) -> str:
        return Format(self.key, self.value, self.group_size).name

    def groups(self, head_dim: int) -> int:
        """Groups of channels in a head."""
        return -(-head_dim // self.group_size)

    def frame_bytes(self, head_dim: int) -> int:
        """Of one head and 8 positions, scales included."""
        scales = {"bf16": 0, "int8": 1, "int4": 1}[self.key] + {"bf16": 0, "int8": 1, "int4": 2}[self.value]
        values = head_dim if self.value != "int4" else -(-head_dim // 32) * 32
        bits = head_dim * BITS[self.key] + values * BITS[self.value] + 16 * scales * self.groups(head_dim)
        return FRAME * bits // 8


@dataclass(frozen=True)
class KeyCalibration:
    """What integer keys are before they are rounded: (key - zero) / factor, per channel as stored, after the rotation.

    float32 [layers, kv_heads, head_dim]; factor is above 0. Pairs of a rotation are channels (i, i + head_dim / 2), also where the model
    file interleaves them.
    """

    factor: npt.NDArray[np.float32]
    zero: npt.NDArray[np.float32]


@dataclass(frozen=True)
class KVLayout:
    """Groups of pairs, each with page tables of its own; pair i of every group lies in slot i of the pool, so that frames are of one size
    and numbered once for all groups. `streaming` has the rule of each group, None for those that see everything.

    Every pair of the program is in one group.
    """

    format: KVFormat
    groups: tuple[tuple[Pair, ...], ...]
    streaming: tuple[Streaming | None, ...]
    calibration: KeyCalibration | None = field(default=None, compare=False)

    @classmethod
    def single(cls, program: Program, format: KVFormat | None = None) -> KVLayout:
        """All pairs in one group."""
        pairs = tuple((layer, head) for layer in range(program.layers) for head in range(program.shape.kv_heads))
        return cls(format or KVFormat(), (pairs,), (None,))

    @property
    def slots(self) -> int:
        """Pairs that the pool has room for in each frame."""
        return max(len(group) for group in self.groups)

    def frame_bytes(self, head_dim: int) -> int:
        """Of a frame in the pool."""
        return self.slots * self.format.frame_bytes(head_dim)

    def group_of(self) -> dict[Pair, int]:
        return {pair: number for number, group in enumerate(self.groups) for pair in group}
