"""How large the KV pool is, and how long a sequence may get: pure decisions from sizes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.types import FRAME
from tokenmill.kv.footprint import Footprint, frames_for


@dataclass(frozen=True)
class Capacity:
    """n_frames: of 8 positions each. max_model_len: tokens of prompt plus output that one sequence may have. n_tokens: that the pool
    would hold of one if the model's context were no limit."""

    n_frames: int
    max_model_len: int
    n_tokens: int


def plan_capacity(config: EngineConfig, context: int, frame_bytes: int, footprint: Footprint, available: int) -> Capacity:
    """Decide the pool from the settings.

    context: the model's own limit, tokens. frame_bytes: of a frame of one KV group. footprint: how many groups there are, and what
    they keep. available: bytes of free memory. Raises `ConfigError` when a stated length cannot be served.
    """
    wanted = config.max_model_len
    if wanted is not None and wanted > context:
        raise ConfigError(f"max_model_len is {wanted}, but the model's context is {context}: lower it", param="max_model_len")
    budget_gb = config.kv_cache_config.memory_budget_gb
    budget = int(budget_gb * 2**30) if budget_gb is not None else int(available * config.memory_share)
    if budget > available:
        free = f"{available / 2**30:.1f} GB"
        raise ConfigError(f"memory_budget_gb is {budget_gb}, but only {free} are available: lower it", param="memory_budget_gb")
    length = wanted or context

    def alone(frames: int) -> int:
        """Frames of all groups for a sequence with so many frames of positions."""
        return footprint.taken(0, frames, config.chunk if config.enable_chunked_prefill else length)

    most = config.max_batch_size * alone(frames_for(length) + 1)
    n_frames = min(budget // frame_bytes, most)
    holds = FRAME * (bisect_right(range(1, frames_for(length) + 1), n_frames, key=alone))
    if holds < FRAME or (wanted is not None and wanted > holds):
        need = alone(frames_for(wanted or FRAME)) * frame_bytes / 2**30
        raise ConfigError(
            f"the KV pool of {budget / 2**30:.3f} GB holds {holds} tokens, but max_model_len is {wanted or FRAME}: "
            f"raise memory_budget_gb to {need:.3f} or lower max_model_len",
            param="memory_budget_gb",
        )
    bounded = footprint.whole + footprint.streaming == 0  # a sequence of any length takes no more than the windows
    positions = n_frames // footprint.groups if bounded else bisect_right(range(1, n_frames + 1), n_frames, key=alone)
    return Capacity(n_frames, min(length, holds), FRAME * positions)
