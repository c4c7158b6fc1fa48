"""From a path to something that runs: configuration, program, packed weights and vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import ModelFileError, UnknownArchitecture
from tokenmill.kernels.native import PackedWeight, Pool
from tokenmill.kernels.ops import AddNorm, Embed, Linear, Program, RotateAndStore
from tokenmill.models import gemma3, llama, qwen2, qwen3
from tokenmill.models.config import ModelConfig
from tokenmill.models.source import Source, as_float32
from tokenmill.weights.tensor import RawTensor

F32 = npt.NDArray[np.float32]

ARCHITECTURES: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
}
"""By the name that GGUF files and config.json give; each module has `config(source)` and `program(config)`."""


NARROW = 5.1
"""Bits of a weight, scales included: up to so many it is as good as of 4."""


@dataclass(frozen=True)
class Model:
    """Weights are shared by name: a tied output head is the embedding's own packed weight."""

    config: ModelConfig
    program: Program
    weights: dict[str, PackedWeight]
    vectors: dict[str, F32]

    @property
    def weight_bytes(self) -> int:
        return sum({id(w): w.nbytes for w in self.weights.values()}.values())

    def narrow(self, pool: Pool) -> Model:
        """The same with weights of 4 bits, where they have more and come in blocks of 32: at a loss, but fewer bytes."""
        each = {id(w): w for w in self.weights.values()}
        narrow = {at: w.narrow(pool) if w.cols % 32 == 0 and 8 * w.nbytes > NARROW * w.rows * w.cols else w for at, w in each.items()}
        return replace(self, weights={name: narrow[id(w)] for name, w in self.weights.items()})


def describe(source: Source) -> tuple[ModelConfig, Program]:
    """Configuration and program of an open file. Raises `UnknownArchitecture` listing the known ones."""
    module = ARCHITECTURES.get(source.architecture)
    if module is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitecture(f"{source.path}: architecture {source.architecture!r} is not known; known are: {known}")
    config: ModelConfig = module.config(source)
    return config, module.program(config)


def load(path: str | Path, pool: Pool) -> Model:
    """Read, check and pack a model. Raises `ModelFileError` naming the tensor or field at fault."""
    source = Source.open(path)
    config, program = describe(source)
    weight_names, lengths = needed(program)
    shapes = _shapes(config)
    weights: dict[str, PackedWeight] = {}
    for name in weight_names:
        if name == "head" and not source.has("head"):
            continue
        tensor = source.tensor(name)
        _check(tensor, *shapes[name.rpartition(".")[2]])
        weights[name] = PackedWeight.pack(tensor.type, tensor.rows, tensor.cols, tensor.data, pool)
    weights.setdefault("head", weights["embed"])
    vectors = {name: _vector(source, config, name, length) for name, length in lengths.items()}
    return Model(config, program, weights, vectors)


def needed(program: Program) -> tuple[list[str], dict[str, int]]:
    """Names of the weights that a program uses, each once, and the lengths of its vectors by name."""
    weights: dict[str, None] = {}
    vectors: dict[str, int] = {}
    for op in program.ops:
        match op:
            case Embed():
                weights[op.weight] = None
            case Linear():
                weights.update(dict.fromkeys(op.weights))
                if op.norm is not None:
                    vectors[op.norm.weight] = op.x.width
                if op.bias is not None:
                    vectors[op.bias] = op.out.width
            case RotateAndStore():
                vectors.update({n: op.shape.head_dim for n in (op.q_norm, op.k_norm) if n is not None})
            case AddNorm():
                vectors[op.norm.weight] = op.x.width
    return list(weights), vectors


def _shapes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) that each weight must have."""
    q, kv = c.shape.heads * c.shape.head_dim, c.shape.kv_heads * c.shape.head_dim
    table = (c.vocab, c.hidden)
    layer = {"q": (q, c.hidden), "k": (kv, c.hidden), "v": (kv, c.hidden), "o": (c.hidden, q)}
    ffn = {"gate": (c.ffn, c.hidden), "up": (c.ffn, c.hidden), "down": (c.hidden, c.ffn)}
    return {"embed": table, "head": table, **layer, **ffn}


def _check(tensor: RawTensor, rows: int, cols: int) -> None:
    if (tensor.rows, tensor.cols) != (rows, cols):
        raise ModelFileError(
            f"{tensor.name} is {tensor.rows} x {tensor.cols}, but the model's configuration asks for {rows} x {cols}", param=tensor.name
        )


def _vector(source: Source, config: ModelConfig, name: str, length: int) -> F32:
    layer, _, part = name.rpartition(".")
    if part == "qkv_bias":
        shapes = _shapes(config)
        return np.concatenate([_numbers(source, f"{layer}.{p}_bias", shapes[p][0]) for p in "qkv"])
    return _numbers(source, name, length) + np.float32(config.norm_offset)


def _numbers(source: Source, name: str, length: int) -> F32:
    tensor = source.tensor(name)
    numbers = as_float32(tensor)
    if len(numbers) != length:
        raise ModelFileError(f"{tensor.name} has {len(numbers)} elements, but the model needs {length}", param=tensor.name)
    return numbers
