"""Tiny random models as GGUF files, of every architecture, whole or damaged in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@dataclass
class TinyModel:
    """A model with random weights, under which every token matters. `kind` is the GGUF type of its matrices.

    metadata, other_metadata and tensors hold what `write` writes; change them to damage the file (metadata None is left
    out). Keys of `metadata` are given without the architecture's prefix, which those of `other_metadata` do not have.
    """

    architecture: str = "llama"
    vocab: int = 97
    hidden: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 3
    context: int = 512
    tied: bool = True
    kind: str = "F32"
    seed: int = 1
    metadata: dict[str, Any] = field(default_factory=dict)
    other_metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.metadata = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
            **({"attention.sliding_window": 24} if self.architecture == "gemma3" else {}),
            **self.metadata,
        }
        self.tensors = {"token_embd.weight": self._matrix(self.vocab, self.hidden), "output_norm.weight": self._norm(self.hidden)}
        if not self.tied:
            self.tensors["output.weight"] = self._matrix(self.vocab, self.hidden)
        for layer in range(self.layers):
            self.tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in self._layer().items()}

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            _put(writer, f"{self.architecture}.{key}", value)
        for key, value in self.other_metadata.items():
            _put(writer, key, value)
        for name, tensor in self.tensors.items():
            kind = gguf.GGMLQuantizationType[self.kind if tensor.ndim == 2 else "F32"]
            if tensor.dtype == np.uint8:  # already quantised
                writer.add_tensor(name, tensor, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _layer(self) -> Mapping[str, Array]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors = {
            "attn_norm.weight": self._norm(self.hidden),
            "attn_q.weight": self._matrix(q, self.hidden),
            "attn_k.weight": self._matrix(kv, self.hidden),
            "attn_v.weight": self._matrix(kv, self.hidden),
            "attn_output.weight": self._matrix(self.hidden, q),
            "ffn_norm.weight": self._norm(self.hidden),
            "ffn_gate.weight": self._matrix(self.ffn, self.hidden),
            "ffn_up.weight": self._matrix(self.ffn, self.hidden),
            "ffn_down.weight": self._matrix(self.hidden, self.ffn),
        }
        if self.architecture == "qwen2":
            widths = {"q": q, "k": kv, "v": kv}
            tensors |= {f"attn_{part}.bias": self._rng.standard_normal(n).astype(np.float32) for part, n in widths.items()}
        if self.architecture in ("qwen3", "gemma3"):
            tensors |= {f"attn_{part}_norm.weight": self._norm(self.head_dim) for part in "qk"}
        if self.architecture == "gemma3":
            tensors |= {f"post_{part}_norm.weight": self._norm(self.hidden) for part in ("attention", "ffw")}
        return tensors

    def _matrix(self, rows: int, cols: int) -> Array:
        return (self._rng.standard_normal((rows, cols)) * 2 * cols**-0.5).astype(np.float32)

    def _norm(self, n: int) -> Array:
        return (1 + 0.2 * self._rng.standard_normal(n)).astype(np.float32)


def _put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
