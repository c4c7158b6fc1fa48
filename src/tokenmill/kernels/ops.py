"""The vocabulary of a forward pass: a `Program` is a flat list of these ops over named buffers and weights.

A model writes its forward pass once as a program. `kernels/tape.py` compiles it into the native tape; `kernels/reference.py`
runs it in NumPy. Every op works on all rows of the step at once; what is computed is fixed by docs/numerics.md.

Rows: a *token* buffer has one row per token in the step, an *output* buffer one per row whose logits are wanted.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Int32s: TypeAlias = "npt.NDArray[np.int32] | array[int]"
"""int32 numbers in a row: of NumPy, or an `array("i")`, which costs less for a few."""

NUMERICS_VERSION = 2


@dataclass(frozen=True)
class Buffer:
    """Activations, float32 [rows, width]."""

    name: str
    width: int
    rows: Literal["tokens", "outputs"] = "tokens"


@dataclass(frozen=True)
class RMSNorm:
    """y = x / rms(x) * weight, over the row."""

    weight: str
    eps: float


Result = Literal["store", "add", "silu", "gelu_tanh"]


@dataclass(frozen=True)
class Embed:
    """out[t] = scale * weight[token t]."""

    weight: str
    out: Buffer
    scale: float = 1.0


@dataclass(frozen=True)
class Linear:
    """y = norm(x) @ [W0 | W1 | …].T (+ bias), the weights' outputs side by side.

    `result` says what becomes of y: out = y, out += y, or, with two weights of equal shape, out = activation(y0) * y1. Weights
    are [outputs, width of x] each and may differ in form; all but the last have a multiple of 16 outputs.
    """

    x: Buffer
    weights: tuple[str, ...]
    out: Buffer
    norm: RMSNorm | None = None
    bias: str | None = None
    result: Result = "store"


@dataclass(frozen=True)
class Heads:
    """The shape of an attention layer. Query head h reads key/value head h // (heads // kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class RotateAndStore:
    """Split rows of qkv = [q | k | v], normalise heads (if asked), rotate q and k, write k and v to the layer's pages, keep q.

    `rope` indexes `Program.ropes`. `scale` multiplies q (it includes log2 e). q_norm and k_norm are vectors of head_dim.
    """

    qkv: Buffer
    layer: int
    shape: Heads
    rope: int
    scale: float
    interleaved: bool = False
    q_norm: str | None = None
    k_norm: str | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Attention:
    """out = softmax(q k) v over the layer's pages, for the q kept by the `RotateAndStore` before it.

    `window` None sees every position up to the row's own; W sees the last W, its own included.
    """

    layer: int
    shape: Heads
    out: Buffer
    window: int | None = None


@dataclass(frozen=True)
class AddNorm:
    """x += rms_norm(y)."""

    x: Buffer
    y: Buffer
    norm: RMSNorm


@dataclass(frozen=True)
class Select:
    """out = the rows of x whose logits are wanted."""

    x: Buffer
    out: Buffer


Op = Embed | Linear | RotateAndStore | Attention | AddNorm | Select


@dataclass
class Program:
    """A forward pass. The last op's output is the logits, [outputs, vocabulary].

    ropes: inverse frequencies per rotary variant, float64 [head_dim / 2]. layers: number of layers with KV.
    """

    shape: Heads
    layers: int
    ops: list[Op] = field(default_factory=list)
    ropes: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def add(self, op: Op) -> None:
        self.ops.append(op)

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers in order of first use."""
        seen: dict[str, Buffer] = {}
        for op in self.ops:
            for value in vars(op).values():
                if isinstance(value, Buffer):
                    assert seen.setdefault(value.name, value) == value, f"buffer {value.name} has two shapes"
        return list(seen.values())


class Pages(NamedTuple):
    """The pages of a sequence in one KV group, as extents of consecutive frames; arrays of equal length.

    frames: the first frame of each extent, or -1: the extent is a hole, whose positions have no frames and are not seen.
    starts: the index (position // 8) of that frame within the sequence, ascending. An extent ends where the next one starts.
    """

    frames: Int32s
    starts: Int32s


class Segment(NamedTuple):
    """The part of a step that belongs to one sequence: `rows` consecutive rows from `row`, at positions from `position`.

    pages: one per KV group of the layout, which have frames for all these positions. sparse: streaming groups see only what
    `Streaming` says. weigh: index of `Batch.weights` to which these rows' attention weights are added, or -1.
    """

    row: int
    rows: int
    position: int
    pages: tuple[Pages, ...]
    sparse: bool = False
    weigh: int = -1


@dataclass(frozen=True)
class Batch:
    """One step's input: token ids [rows], segments covering all rows in order, and the rows whose logits are wanted.

    weights: one array for each segment that weighs, int64 [layers * kv_heads, frames of the sequence or more], to which the share of
    attention that the segment's rows give to each frame is added once the step is finished: 2^32 for the whole attention of one row
    in one query head, summed over rows and the query heads of the pair.
    """

    tokens: Int32s
    segments: list[Segment]
    outputs: Int32s
    weights: tuple[npt.NDArray[np.int64], ...] = ()
