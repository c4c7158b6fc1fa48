"""What engines of one model have in common, be they in one process or in several."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.config import EngineConfig
from tokenmill.engine.cache import needs_calibration
from tokenmill.engine.calibrate import find_calibration
from tokenmill.engine.loading import Loaded, load_model
from tokenmill.engine.speculation import Drafter, load_drafter
from tokenmill.models.calibration import Calibration
from tokenmill.models.loader import Model


class Shared(NamedTuple):
    """Whatever of an engine is neither threads, nor KV, nor a request, and is never written again. seconds: that it took."""

    config: EngineConfig
    model: Model
    digest: Future[bytes]
    calibration: Calibration | None
    drafter: Drafter | None
    seconds: float

    def serves(self, config: EngineConfig) -> bool:
        """Whether an engine of these settings would load the same. Threads, sizes, and whether it drafts are its own."""
        ours, draft = self.config, config.speculative_config.model
        return (
            ours.model == config.model
            and draft in (None, ours.speculative_config.model)
            and ours.kv_cache_config.compression == config.kv_cache_config.compression
            and ours.attention_config == config.attention_config
        )


def load_shared(config: EngineConfig) -> Shared:
    """Raises as `build_engine`. No threads are left but the digest's, which is about to end."""
    started = time.monotonic()
    shared = share(config, load_model(config), started)
    shared.digest.result()
    return shared


def share(config: EngineConfig, loaded: Loaded, started: float) -> Shared:
    """With a model that is in memory. started: when its load began, on the monotonic clock. Raises as `build_engine`."""
    calibration = find_calibration(Path(config.model), loaded) if needs_calibration(config) else None
    drafter = load_drafter(config, loaded)
    return Shared(config, loaded.model, loaded.digest, calibration, drafter, time.monotonic() - started)
