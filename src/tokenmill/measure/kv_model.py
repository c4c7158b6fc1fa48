"""What of a model decides its KV cache; nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.config import EngineConfig
from tokenmill.engine.cache import design_cache
from tokenmill.kernels.layout import KVLayout
from tokenmill.kv.footprint import Footprint
from tokenmill.kv.groups import KVGroup
from tokenmill.models.loader import describe
from tokenmill.models.source import Source

CHUNK: int = EngineConfig(model="").chunk_size
"""Prompt tokens in one step of an engine."""


@dataclass(frozen=True)
class KVModel:
    """groups and layout: of a 16-bit cache. pairs: layers times KV heads. context: the model's own limit, tokens."""

    groups: tuple[KVGroup, ...]
    layout: KVLayout
    head_dim: int
    pairs: int
    context: int

    @classmethod
    def of(cls, path: Path) -> KVModel:
        """Raises `ModelFileError`."""
        config, _ = describe(Source.open(path))
        plain = design_cache(EngineConfig(model=""), config, None)
        return cls(plain.groups, plain.layout, config.shape.head_dim, len(config.layers) * config.shape.kv_heads, config.context)

    @property
    def footprint(self) -> Footprint:
        return Footprint.of(self.groups)

    @property
    def frame_bytes(self) -> int:
        """Of a frame of one group."""
        return self.layout.frame_bytes(self.head_dim)
