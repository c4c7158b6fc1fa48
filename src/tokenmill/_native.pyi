"""Types of the native module (native/bind). Arrays are C-contiguous; `out` arrays are written."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill.kernels.ops import Int32s

_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]
_F32 = NDArray[np.float32]
_U32 = NDArray[np.uint32]
_F64 = NDArray[np.float64]
_U8 = NDArray[np.uint8]

def variants() -> list[str]: ...

class Pool:
    def __init__(self, threads: int, cpus: Sequence[int]) -> None: ...
    def give_way(self) -> None: ...
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
def narrow(weight: Weight, pool: Pool) -> Weight: ...

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
        key: str,
        value: str,
        group_size: int,
        groups: Sequence[Sequence[tuple[int, int]]],
        streaming: Sequence[tuple[int, int]],
    ) -> None: ...
    def calibrate(self, layer: int, factor: _F32, zero: _F32) -> None: ...
    def add_buffer(self, width: int, output_rows: bool, plain: bool) -> int: ...
    def add_rope(self, inverse: _F64, /) -> int: ...
    def embed(self, weight: Weight, out: int, scale: float) -> None: ...
    def linear(self, x: int, weights: Sequence[Weight], out: int, norm: _F32, eps: float, bias: _F32, result: str) -> None: ...
    def rotate_store(
        self, qkv: int, layer: int, rope: int, scale: float, interleaved: bool, q_norm: _F32, k_norm: _F32, eps: float
    ) -> None: ...
    def attention(self, layer: int, out: int, window: int) -> None: ...
    def add_norm(self, x: int, y: int, weight: _F32, eps: float) -> None: ...
    def select(self, x: int, out: int) -> None: ...
    def start(
        self,
        tokens: Int32s,
        segments: Int32s,
        tables: Int32s,
        frames: Int32s,
        starts: Int32s,
        outputs: Int32s,
        weights: Sequence[_I64],
    ) -> None: ...
    def finish(self) -> None: ...
    def rerun(self, outputs: Int32s) -> None: ...
    def read_keys(self, tables: Int32s, frames: Int32s, starts: Int32s, out: _F32) -> None: ...
    def buffer(self, index: int, rows: int) -> _F32: ...
    @property
    def kv_bytes(self) -> int: ...
    def fill_kv(self, byte: int) -> None: ...

class SampleState:
    def __init__(
        self,
        temperature: float,
        top_p: float,
        min_p: float,
        top_k: int,
        repetition: float,
        presence: float,
        frequency: float,
        seed: int,
        choice: int,
        min_tokens: int,
        bias: Sequence[int],
        bias_value: Sequence[float],
        ends: Sequence[int],
        prompt: Sequence[int],
    ) -> None: ...
    def observe(self, token: int) -> None: ...
    def retract(self, token: int) -> None: ...

def sample(
    pool: Pool,
    variant: str,
    logits: _F32,
    rows: Sequence[int],
    states: Sequence[SampleState],
    positions: Sequence[int],
    drafts: Sequence[Sequence[int]],
    allowed: Sequence[_U32 | None],
    stream: int,
) -> list[list[int]]: ...
def reject(
    pool: Pool,
    variant: str,
    logits: _F32,
    rows: Sequence[int],
    states: Sequence[SampleState],
    positions: Sequence[int],
    drafts: Sequence[Sequence[int]],
    allowed: Sequence[_U32 | None],
    proposals: Sequence[_F32 | None],
) -> list[list[int]]: ...
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
def gumbel(seed: int, choice: int, position: int, token: int, stream: int = 0) -> float: ...
def run_int8(pool: Pool, variant: str, rounds: int) -> float: ...
def run_bf16(pool: Pool, variant: str, rounds: int) -> float: ...
def run_read(pool: Pool, variant: str, data: _U8) -> int: ...

class SuffixDraft:
    @property
    def tokens(self) -> list[int]: ...
    @property
    def shares(self) -> list[float]: ...
    @property
    def matches(self) -> list[int]: ...
    @property
    def expected(self) -> float: ...

class SuffixIndex:
    def __init__(self, depth: int) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def end(self) -> None: ...
    def draft(self, context: Sequence[int], most: int, floor: float, trust: _F64) -> SuffixDraft: ...
    @property
    def states(self) -> int: ...
    @property
    def edges(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def work(self) -> int: ...
