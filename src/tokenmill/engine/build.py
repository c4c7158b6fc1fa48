"""From a configuration to an engine: the one place where its parts meet."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.clock import MonotonicClock
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ModelNotFound
from tokenmill.core.messages import EngineInfo
from tokenmill.core.types import FRAME
from tokenmill.engine.cache import RequestBudget, design_cache, needs_calibration
from tokenmill.engine.calibrate import find_calibration
from tokenmill.engine.engine import Engine
from tokenmill.engine.memory import available_memory, plan_capacity
from tokenmill.engine.runner import MAX_OUTPUTS, Runner
from tokenmill.kernels.layout import KVFormat
from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import NUMERICS_VERSION
from tokenmill.kernels.tape import Tape
from tokenmill.kv.footprint import Footprint
from tokenmill.kv.manager import KVManager
from tokenmill.models.loader import Model, load
from tokenmill.sampling.sampler import Sampler
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler

CHECK_VARIABLE = "TOKENMILL_CHECK"
"""Environment variable: 1 checks every frame's owner whenever an engine is idle (slow; tests set it)."""


class Loaded(NamedTuple):
    """A model in memory, the threads that compute it, and its file's digest: what engines of different settings can share."""

    pool: Pool
    model: Model
    digest: Future[bytes]


def load_model(config: EngineConfig) -> Loaded:
    """Raises `ModelNotFound`, `ModelFileError` or `KernelError`."""
    path = Path(config.model)
    if not path.exists():
        raise ModelNotFound(f"there is no model file or folder {config.model!r}", param="model")
    digest = _digest_beside(path)
    pool = Pool(config.threads, cpus=config.cpus)
    return Loaded(pool, load(path, pool), digest)


def build_engine(config: EngineConfig, loaded: Loaded | None = None, sampler: Sampler | None = None) -> Engine:
    """Load the model and reserve its memory. Raises `ModelFileError`, `ConfigError` or `KernelError`.

    loaded: the model if it is in memory already; of several engines that share it one can be in a step at a time. sampler: who
    turns logits into tokens; a measurement gives one that keeps them.
    """
    started = time.monotonic()
    loaded = loaded or load_model(config)
    pool, model, digest = loaded
    calibration = find_calibration(Path(config.model), loaded) if needs_calibration(config) else None
    groups, layout, policy, identity = design_cache(config, model.config, calibration)
    head_dim = model.program.shape.head_dim
    frame_bytes, wide_frame_bytes = layout.frame_bytes(head_dim), layout.slots * KVFormat().frame_bytes(head_dim)
    budget = RequestBudget.of(config, frame_bytes, len(groups))
    capacity = plan_capacity(config, model.config.context, frame_bytes, Footprint.of(groups), available_memory())
    prompt_rows = config.chunk_size if config.enable_chunked_prefill else max(config.chunk_size, capacity.max_model_len)
    tape = Tape(
        model.program,
        model.weights,
        model.vectors,
        pool,
        max_rows=prompt_rows + config.max_batch_size,
        max_outputs=MAX_OUTPUTS,
        n_frames=capacity.n_frames,
        layout=layout,
    )
    kv = KVManager(groups, capacity.n_frames, config.block_manager_config, policy)
    limits = Limits(config.max_batch_size, config.chunk_size, config.enable_chunked_prefill)
    info = EngineInfo(
        model=config.name,
        architecture=model.config.architecture,
        vocab_size=model.config.vocab,
        max_model_len=capacity.max_model_len,
        kv_tokens=capacity.n_tokens,
        kv_bytes=capacity.n_frames * frame_bytes,
        kv_bytes_per_token=frame_bytes * len(groups) // FRAME,
        kv_format=str(layout.format),
        kv_bytes_saved_per_token=(wide_frame_bytes - frame_bytes) * len(groups) // FRAME,
        max_batch_size=config.max_batch_size,
        threads=pool.threads,
        cpus=pool.cpus,
        kernels=pool.variant,
        fingerprint=fingerprint(digest.result(), pool.variant, identity),
        pid=os.getpid(),
        load_seconds=time.monotonic() - started,
    )
    runner = Runner(tape, kv, sampler or Sampler(pool), model.config.vocab)
    checks = os.environ.get(CHECK_VARIABLE) == "1"
    return Engine(info, Scheduler(kv, limits), runner, MonotonicClock(), budget, check_when_idle=checks)


def fingerprint(model_digest: bytes, variant: str, cache: str) -> str:
    """Digest of everything that decides the bits of an answer: model file, kernel variant, `CacheDesign.identity`, numerics version."""
    return hashlib.sha256(model_digest + f"{variant} {cache} {NUMERICS_VERSION}".encode()).hexdigest()


def model_digest(path: Path) -> bytes:
    """Of the model's file, or of the digests of its folder's files. Raises OSError."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json"))
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").digest())
    return b"".join(digests)


def _digest_beside(path: Path) -> Future[bytes]:
    """`model_digest` by a thread, which takes its seconds per gigabyte while the weights are packed; a load that fails does not
    wait for it."""
    found: Future[bytes] = Future()

    def work() -> None:
        try:
            found.set_result(model_digest(path))
        except OSError as error:
            found.set_exception(error)

    threading.Thread(target=work, name="model digest", daemon=True).start()
    return found
