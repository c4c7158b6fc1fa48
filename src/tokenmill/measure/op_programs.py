"""Programs of one op of a model, many times over, so that its time is far above that of starting a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tokenmill.kernels.ops import Attention, Buffer, Embed, Heads, Linear, Program, Result, RMSNorm, RotateAndStore
from tokenmill.models import llama
from tokenmill.models.config import Layer, ModelConfig, inverse_frequencies
from tokenmill.models.loader import describe, needed
from tokenmill.models.source import Source

TOKENS = 256
"""Rows of the embedding that fills a program's input."""

EPS = 1e-5


@dataclass(frozen=True)
class Part:
    """One weight [rows, cols] of a linear op, in a form."""

    form: str
    rows: int
    cols: int


@dataclass(frozen=True)
class LinearKind:
    """Linear ops that cost the same. name: what is projected, such as `q k v`; result: as in `kernels.ops.Linear`; of_outputs: the
    output head, which no step has more rows of than an engine wants logits."""

    name: str
    parts: tuple[Part, ...]
    normed: bool
    result: Result
    of_outputs: bool

    @property
    def outputs(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def form(self) -> str:
        return " ".join(dict.fromkeys(part.form for part in self.parts))

    def operations(self, rows: int) -> int:
        return 2 * rows * self.outputs * self.cols

    def program(self, copies: int) -> Program:
        """Weights are named `<copy>.<part>`; the input's embedding is `embed`, the norm's vector `norm`."""
        gated = self.result in ("silu", "gelu_tanh")
        x, out = Buffer("x", self.cols), Buffer("out", self.outputs // 2 if gated else self.outputs)
        norm = RMSNorm("norm", EPS) if self.normed else None
        p = Program(Heads(1, 1, 16), 1)
        p.add(Embed("embed", x))
        for copy in range(copies):
            names = tuple(f"{copy}.{part}" for part in range(len(self.parts)))
            p.add(Linear(x, names, out, norm, result=self.result))
        return p

    def narrowed(self, outputs: int) -> LinearKind:
        """The same input before a small product."""
        return replace(self, parts=(replace(self.parts[0], rows=outputs),), result="store")


@dataclass(frozen=True)
class ModelOps:
    """What there is to measure of a model: linear ops with how often a pass has them, attention, context in tokens."""

    linear: dict[LinearKind, int]
    shape: Heads
    window: int | None
    context: int


def ops_of(source: Source) -> ModelOps:
    """Of an open model file or folder."""
    config, program = describe(source)
    names = [name for name in needed(program)[0] if name != "head" or source.has("head")]
    forms = {name: source.tensor(name).type for name in names}
    return _ops(config, program, forms | {"head": forms.get("head", forms["embed"])})


def reference_ops(form: str) -> ModelOps:
    """Those of SmolLM2-135M, with every weight in `form`."""
    config = ModelConfig(
        architecture="llama",
        hidden=576,
        ffn=1536,
        shape=Heads(9, 3, 64),
        layers=(Layer(),) * 30,
        vocab=49152,
        eps=EPS,
        context=8192,
        ropes=(inverse_frequencies(64, 100000.0),),
    )
    program = llama.program(config)
    return _ops(config, program, dict.fromkeys(needed(program)[0], form))


def attention_program(shape: Heads, window: int | None, layers: int) -> Program:
    """Rotary embedding, storing and attention, in `layers` layers with KV of their own; the input's embedding is `embed`.

    A program ends with a linear op: here one so small (`end`) that it takes no time.
    """
    qkv = Buffer("qkv", (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    attended, end = Buffer("attended", shape.heads * shape.head_dim), Buffer("end", 16)
    p = Program(shape, layers, ropes=[inverse_frequencies(shape.head_dim, 10000.0)])
    p.add(Embed("embed", qkv))
    for layer in range(layers):
        p.add(RotateAndStore(qkv, layer, shape, 0, shape.head_dim**-0.5))
        p.add(Attention(layer, shape, attended, window))
    p.add(Linear(attended, ("end",), end))
    return p


def norm_of(kind: LinearKind) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """The vectors of its program."""
    return {"norm": np.ones(kind.cols, np.float32)} if kind.normed else {}


def _ops(config: ModelConfig, program: Program, forms: dict[str, str]) -> ModelOps:
    kinds: dict[LinearKind, int] = {}
    for op in program.ops:
        if isinstance(op, Linear):
            kind = _kind(op, forms, config)
            kinds[kind] = kinds.get(kind, 0) + 1
    windows = {op.window for op in program.ops if isinstance(op, Attention)}
    return ModelOps(kinds, config.shape, None if None in windows else max(w for w in windows if w), config.context)


def _kind(op: Linear, forms: dict[str, str], config: ModelConfig) -> LinearKind:
    short = [name.rpartition(".")[2] for name in op.weights]
    rows = _rows(config)
    parts = tuple(Part(forms[name], rows[part], op.x.width) for name, part in zip(op.weights, short, strict=True))
    return LinearKind(" ".join(short), parts, op.norm is not None, op.result, "head" in op.weights)


def _rows(c: ModelConfig) -> dict[str, int]:
    """Outputs of each weight."""
    q, kv = c.shape.heads * c.shape.head_dim, c.shape.kv_heads * c.shape.head_dim
    return {"q": q, "k": kv, "v": kv, "o": c.hidden, "gate": c.ffn, "up": c.ffn, "down": c.hidden, "head": c.vocab}
