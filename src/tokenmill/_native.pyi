"""Types of the native module (native/bind). Arrays are C-contiguous; `out` arrays are written."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]
_F32 = NDArray[np.float32]
_F64 = NDArray[np.float64]
_U8 = NDArray[np.uint8]

def variants() -> list[str]: ...

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Weight:
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def dequantize_rows(self, rows: _I32, out: _F32) -> None: ...

def pack(type: str, rows: int, cols: int, data: _U8, pool: Pool) -> Weight: ...

class Tape:
    def __init__(
        self,
        pool: Pool,
        variant: str,
        max_rows: int,
        max_outputs: int,
        max_cols: int,
        frames: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> None: ...
    def add_buffer(self, width: int, output_rows: bool) -> int: ...
    def add_rope(self, inverse: _F64, /) -> int: ...
    def embed(self, weight: Weight, out: int, scale: float) -> None: ...
    def linear(
        self, x: int, weights: Sequence[Weight], out: int, norm: _F32, eps: float, bias: _F32, result: str
    ) -> None: ...
    def rotate_store(
        self, qkv: int, layer: int, rope: int, scale: float, interleaved: bool, q_norm: _F32, k_norm: _F32, eps: float
    ) -> None: ...
    def attention(self, layer: int, out: int, window: int) -> None: ...
    def add_norm(self, x: int, y: int, weight: _F32, eps: float) -> None: ...
    def select(self, x: int, out: int) -> None: ...
    def run(self, tokens: _I32, segments: _I32, frames: _I32, starts: _I32, outputs: _I32) -> None: ...
    def rerun(self, outputs: _I32) -> None: ...
    def buffer(self, index: int, rows: int) -> _F32: ...
    @property
    def kv_bytes(self) -> int: ...
    def fill_kv(self, byte: int) -> None: ...

def sample(
    pool: Pool,
    variant: str,
    logits: _F32,
    reals: _F64,
    wholes: _I64,
    ends: _I32,
    seen: _I32,
    seen_count: _I32,
    bias: _I32,
    bias_value: _F32,
    banned: _I32,
    out: _I32,
) -> None: ...
def likelihoods(
    pool: Pool,
    variant: str,
    logits: _F32,
    rows: _I32,
    tokens: _I32,
    logprob: _F64,
    rank: _I32,
    top: _I32,
    top_logprob: _F64,
) -> None: ...
def gumbel(seed: int, choice: int, position: int, token: int) -> float: ...
