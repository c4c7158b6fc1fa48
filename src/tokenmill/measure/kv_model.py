"""What of a model decides its KV cache; nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenmill.core.config import EngineConfig
from tokenmill.engine.cache import design_cache
from tokenmill.kernels.layout import KeyCalibration, KVLayout
from tokenmill.kv.budget import SparsePolicy
from tokenmill.kv.footprint import Footprint
from tokenmill.kv.groups import KVGroup
from tokenmill.models.calibration import Calibration
from tokenmill.models.config import ModelConfig
from tokenmill.models.loader import describe
from tokenmill.models.source import Source

PLAIN = EngineConfig(model="")
CHUNK: int = PLAIN.chunk
"""Prompt tokens in one step of an engine."""


@dataclass(frozen=True)
class KVModel:
    """groups, layout, policy: of the cache of one configuration. pairs: layers times KV heads. context: the model's own limit, tokens."""

    groups: tuple[KVGroup, ...]
    layout: KVLayout
    head_dim: int
    pairs: int
    context: int
    policy: SparsePolicy

    @classmethod
    def of(cls, path: Path, settings: EngineConfig = PLAIN) -> KVModel:
        """Raises `ModelFileError`."""
        config, _ = describe(Source.open(path))
        design = design_cache(settings, config, _some_calibration(config))
        pairs = len(config.layers) * config.shape.kv_heads
        return cls(design.groups, design.layout, config.shape.head_dim, pairs, config.context, design.policy)

    @property
    def footprint(self) -> Footprint:
        return Footprint.of(self.groups)

    @property
    def frame_bytes(self) -> int:
        """Of a frame of one group."""
        return self.layout.frame_bytes(self.head_dim)


def _some_calibration(config: ModelConfig) -> Calibration:
    """Sizes do not depend on what a calibration has found: it says which heads stay whole, not how many."""
    shape = (len(config.layers), config.shape.kv_heads, config.shape.head_dim)
    return Calibration(KeyCalibration(np.ones(shape, np.float32), np.zeros(shape, np.float32)), np.zeros(shape[:2], np.float32))
