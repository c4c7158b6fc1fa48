"""What a decoder-only transformer's file says about its shape, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import ModelFileError
from tokenmill.kernels.ops import Heads

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Layer:
    """What differs between layers: the rotary variant (an index into `ropes`) and the window, None for none."""

    rope: int = 0
    window: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. Lengths are elements; `context` is tokens.

    ropes: inverse frequencies per rotary variant, float64 [head_dim / 2]. interleaved: the q and k rows of the file
    are ordered for pairs (2i, 2i + 1). attention_scale: None is 1 / sqrt(head_dim). norm_offset is added to the file's norm
    weights.
    """

    architecture: str
    hidden: int
    ffn: int
    shape: Heads
    layers: tuple[Layer, ...]
    vocab: int
    eps: float
    context: int
    ropes: tuple[npt.NDArray[np.float64], ...]
    interleaved: bool = False
    attention_scale: float | None = None
    norm_offset: float = 0.0

    @property
    def qkv_width(self) -> int:
        return (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by: the attention scale in units of log 2."""
        scale = self.shape.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return scale * LOG2E


class Fields:
    """Typed, bounded access to a file's configuration; what is missing or absurd raises `ModelFileError` naming the field."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def raw(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def integer(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise ModelFileError(f"{self.prefix}{key} is {value!r}, but must be an integer between {least} and {most}", param=key)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise ModelFileError(f"{self.prefix}{key} is {value!r}, but must be a positive number", param=key)
        return float(value)

    def refuse(self, key: str, *harmless: Any) -> None:
        """Raise if the field asks for something that is not implemented, that is, is set and not one of `harmless`."""
        value = self.raw(key)
        if value is not None and not (isinstance(value, (int, float, str)) and value in harmless):
            raise ModelFileError(f"{self.prefix}{key} is {value!r}, which is not supported", param=key)


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> npt.NDArray[np.float64]:
    """Rotary inverse frequencies theta^(-2i/head_dim), float64 [head_dim / 2], under a Hugging Face style scaling.

    Types: `default`, `linear` (positions divided by `factor`) and `llama3` (low frequencies divided, high ones kept, a
    ramp between; Llama 3.1 model card). Others raise `ModelFileError`.
    """
    inverse = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return inverse
    if not isinstance(scaling, Mapping):
        raise ModelFileError(f"rope_scaling is {scaling!r}, but must be a mapping", param="rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", None):
        return inverse
    fields = Fields(scaling)
    if kind == "linear":
        return inverse / fields.number("factor")
    if kind != "llama3":
        raise ModelFileError(f"rope scaling {kind!r} is not supported; supported are default, linear and llama3", param="rope_scaling")
    factor, original = fields.number("factor"), fields.number("original_max_position_embeddings")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise ModelFileError(f"high_freq_factor {high} must be above low_freq_factor {low}", param="rope_scaling")
    wavelength = 2 * math.pi / inverse
    keep = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return inverse * (keep + (1 - keep) / factor)


def read_shape(fields: Fields, heads: str, kv_heads: str, head_dim: str, hidden: int) -> Heads:
    """Head counts and width from the named fields; the width defaults to hidden / heads."""
    n = fields.integer(heads, 1024)
    kv = fields.integer(kv_heads, 1024, default=n)
    dim = fields.integer(head_dim, 512, default=max(1, hidden // n))
    if n % kv:
        raise ModelFileError(f"{n} query heads cannot share {kv} key heads evenly", param=kv_heads)
    if dim % 16:
        raise ModelFileError(f"head width {dim} is not a multiple of 16, which the attention kernels need", param=head_dim)
    return Heads(n, kv, dim)
