"""How large the KV pool is, and how long a sequence may get: pure decisions from sizes."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.types import FRAME

DEFAULT_SHARE = 0.25
"""Of the memory that is available once the weights are loaded."""


@dataclass(frozen=True)
class Capacity:
    """n_frames: of 8 positions each. max_model_len: tokens of prompt plus output that one sequence may have."""

    n_frames: int
    max_model_len: int


def plan_capacity(config: EngineConfig, context: int, token_bytes: int, available: int) -> Capacity:
    """Decide the pool from the settings.

    context: the model's own limit, tokens. token_bytes: KV bytes per position. available: bytes of free memory.
    Raises `ConfigError` when a stated length cannot be served.
    """
    wanted = config.max_model_len
    if wanted is not None and wanted > context:
        raise ConfigError(f"max_model_len is {wanted}, but the model's context is {context}: lower it", param="max_model_len")
    budget_gb = config.kv_cache_config.memory_budget_gb
    share = config.gpu_memory_utilization if config.gpu_memory_utilization is not None else DEFAULT_SHARE
    budget = int(budget_gb * 2**30) if budget_gb is not None else int(available * share)
    if budget > available:
        free = f"{available / 2**30:.1f} GB"
        raise ConfigError(f"memory_budget_gb is {budget_gb}, but only {free} are available: lower it", param="memory_budget_gb")
    length = wanted or context
    most = config.max_batch_size * (_frames(length) + 1)
    n_frames = min(budget // (token_bytes * FRAME), most)
    if n_frames < 1 or (wanted is not None and _frames(wanted) > n_frames):
        need = _frames(wanted or FRAME) * FRAME * token_bytes / 2**30
        raise ConfigError(
            f"the KV pool of {budget / 2**30:.3f} GB holds {n_frames * FRAME} tokens, but max_model_len is {wanted or FRAME}: "
            f"raise memory_budget_gb to {need:.3f} or lower max_model_len",
            param="memory_budget_gb",
        )
    return Capacity(n_frames, min(length, n_frames * FRAME))


def _frames(tokens: int) -> int:
    return -(-tokens // FRAME)


def available_memory() -> int:
    """Bytes that can be used without swapping, by /proc/meminfo, or by the container's own limit if that is lower."""
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            allowed = limit.read().strip()
            return free if allowed == "max" else max(0, min(free, int(allowed) - int(current.read())))
    except OSError:
        return free
