"""What the kernel tests share: random weights of every type, random page tables, tiny random models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tokenmill.core.types import FRAME
from tokenmill.kernels import ops as kernel_ops
from tokenmill.kernels.ops import (
    AddNorm,
    Attention,
    Batch,
    Buffer,
    Embed,
    Heads,
    Linear,
    Program,
    RMSNorm,
    RotateAndStore,
    Segment,
    Select,
)
from tokenmill.kernels.reference import Reference
from tokenmill.kernels.reference_weights import RefWeight

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_SCALES = {"Q6_K": (208,)} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
"""Where a block's float16 numbers lie; at 0 in the other block types."""


def _weight_bytes(rng: np.random.Generator, kind: str, rows: int, cols: int, size: float = 1.0) -> U8:
    """Random file bytes of a weight whose values are about `size` wide, with every bit pattern of the integers."""
    if kind in ("F32", "F16", "BF16"):
        values = (rng.standard_normal((rows, cols)) * size).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).reshape(-1).view(np.uint8)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert cols % per_block == 0
    raw = rng.integers(0, 256, (rows * cols // per_block, block_bytes), dtype=np.uint8)
    wide = {"Q8_0": 127, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 127}.get(kind, 15 if kind.startswith("Q4") else 31)
    for at in _SCALES.get(kind, (0,)):
        raw[:, at : at + 2] = (rng.standard_normal((len(raw), 1)) * size / wide).astype(np.float16).view(np.uint8)
    return raw.reshape(-1)


@pytest.fixture(scope="session")
def weight_bytes() -> Callable[..., U8]:
    return _weight_bytes


@dataclass
class PagedSequence:
    """The page table of one sequence: random frames, in extents whose frames are consecutive by chance or by choice."""

    frames: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]

    @property
    def pages(self) -> kernel_ops.Pages:
        return kernel_ops.Pages(self.frames, self.starts)

    def segment(self, row: int, rows: int, position: int) -> Segment:
        return Segment(row, rows, position, (self.pages,))


class Pages:
    """Hands out the frames of a pool at random, each to one sequence."""

    def __init__(self, rng: np.random.Generator, n_frames: int) -> None:
        self.rng = rng
        self.n_frames = n_frames
        self.free = set(range(n_frames))

    def sequence(self, positions: int, page: int = 8) -> PagedSequence:
        """Frames for that many positions, in aligned extents of 1 … `page` frames."""
        need = -(-positions // FRAME)
        frames: list[int] = []
        starts: list[int] = []
        have = 0
        while have < need:
            size = int(2 ** self.rng.integers(0, math.log2(page) + 1))
            choices = [f for f in range(0, self.n_frames - size + 1, size) if self.free.issuperset(range(f, f + size))]
            if not choices:
                assert size > 1, "the pool is too small for the test"
                continue
            first = int(self.rng.choice(choices))
            self.free -= set(range(first, first + size))
            frames.append(first)
            starts.append(have)
            have += size
        return PagedSequence(np.array(frames, np.int32), np.array(starts, np.int32))


@pytest.fixture(scope="session")
def pages() -> type[Pages]:
    return Pages


@dataclass(frozen=True)
class Shape:
    """A tiny model. `kinds` are the types of its matrices, taken in turn; `windows` one per layer."""

    hidden: int = 64
    inner: int = 96
    vocab: int = 80
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    windows: tuple[int | None, ...] = (None, None)
    kinds: tuple[str, ...] = ("Q8_0",)
    style: str = "llama"
    interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


@dataclass
class TinyModel:
    """A program with random weights: `files` maps a name to (kind, rows, cols, bytes)."""

    shape: Shape
    seed: int
    program: Program = field(init=False)
    files: dict[str, tuple[str, int, int, U8]] = field(default_factory=dict)
    vectors: dict[str, F32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.shape
        self.rng = np.random.default_rng(self.seed)
        heads = Heads(s.heads, s.kv_heads, s.head_dim)
        frequencies = 1e4 ** -(np.arange(s.head_dim // 2) * 2.0 / s.head_dim)
        self.program = Program(heads, layers=len(s.windows), ropes=[frequencies, frequencies / 8])
        gemma = s.style == "gemma"
        x, y, qkv = Buffer("x", s.hidden), Buffer("y", s.hidden), Buffer("qkv", (s.heads + 2 * s.kv_heads) * s.head_dim)
        attended, inner = Buffer("attended", s.heads * s.head_dim), Buffer("inner", s.inner)
        last, logits = Buffer("last", s.hidden, "outputs"), Buffer("logits", s.vocab, "outputs")
        add = self.program.add
        add(Embed(self._matrix("embed", s.vocab, s.hidden, 1.0), x, scale=8.0 if gemma else 1.0))
        for i, window in enumerate(s.windows):
            qkv_names = tuple(
                self._matrix(f"{i}.{n}", h * s.head_dim, s.hidden) for n, h in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads))
            )
            bias = self._vector(f"{i}.bias", qkv.width, 0.0, 3.0) if s.qkv_bias else None
            add(Linear(x, qkv_names, qkv, norm=self._norm(f"{i}.norm"), bias=bias))
            norms = {n: self._vector(f"{i}.{n}", s.head_dim) for n in ("q_norm", "k_norm")} if s.qk_norm else {}
            scale = s.head_dim**-0.5 / math.log(2)
            add(RotateAndStore(qkv, i, heads, i % 2, scale, s.interleaved, **norms, eps=1e-6))
            add(Attention(i, heads, attended, window))
            out = self._matrix(f"{i}.o", s.hidden, attended.width)
            gate_up = tuple(self._matrix(f"{i}.{n}", s.inner, s.hidden) for n in ("gate", "up"))
            down = self._matrix(f"{i}.down", s.hidden, s.inner)
            if gemma:
                add(Linear(attended, (out,), y))
                add(AddNorm(x, y, self._norm(f"{i}.post")))
            else:
                add(Linear(attended, (out,), x, result="add"))
            add(Linear(x, gate_up, inner, norm=self._norm(f"{i}.norm2"), result="gelu_tanh" if gemma else "silu"))
            if gemma:
                add(Linear(inner, (down,), y))
                add(AddNorm(x, y, self._norm(f"{i}.post2")))
            else:
                add(Linear(inner, (down,), x, result="add"))
        add(Select(x, last))
        add(Linear(last, (self._matrix("head", s.vocab, s.hidden),), logits, norm=self._norm("norm")))

    def _matrix(self, name: str, rows: int, cols: int, size: float | None = None) -> str:
        kind = self.shape.kinds[len(self.files) % len(self.shape.kinds)]
        self.files[name] = (kind, rows, cols, _weight_bytes(self.rng, kind, rows, cols, cols**-0.5 if size is None else size))
        return name

    def _vector(self, name: str, n: int, mean: float = 1.0, spread: float = 0.3) -> str:
        self.vectors[name] = (mean + spread * self.rng.standard_normal(n)).astype(np.float32)
        return name

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._vector(name, self.shape.hidden), 1e-5)

    @property
    def weights(self) -> dict[str, RefWeight]:
        return {name: RefWeight.from_bytes(*file) for name, file in self.files.items()}

    def reference(self, n_frames: int, *, fused: bool = True) -> Reference:
        return Reference(self.program, self.weights, self.vectors, n_frames, fused=fused)

    def tokens(self, n: int) -> npt.NDArray[np.int32]:
        return self.rng.integers(0, self.shape.vocab, n, dtype=np.int32)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., TinyModel]:
    """tiny_model(seed, **Shape fields)."""
    return lambda seed, **shape: TinyModel(Shape(**shape), seed)


def _one_segment(tokens: npt.NDArray[np.int32], table: PagedSequence, position: int) -> Batch:
    rows = len(tokens)
    return Batch(tokens, [table.segment(0, rows, position)], np.arange(rows, dtype=np.int32))


@pytest.fixture(scope="session")
def one_segment() -> Callable[..., Batch]:
    """A step of one sequence that wants the logits of all its rows."""
    return _one_segment
