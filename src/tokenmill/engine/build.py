"""From a configuration to an engine: the one place where its parts meet."""

from __future__ import annotations

import hashlib
import os
import time

from tokenmill.core.clock import MonotonicClock
from tokenmill.core.config import EngineConfig
from tokenmill.core.memory import available_memory
from tokenmill.core.messages import EngineInfo
from tokenmill.core.types import FRAME
from tokenmill.engine.cache import RequestBudget, design_cache
from tokenmill.engine.engine import Engine
from tokenmill.engine.filling import Filling
from tokenmill.engine.loading import Loaded, load_model
from tokenmill.engine.memory import plan_capacity
from tokenmill.engine.runner import MAX_OUTPUTS, Runner
from tokenmill.engine.shared import Shared, share
from tokenmill.engine.speculation import build_speculator
from tokenmill.engine.transit import Transit
from tokenmill.kernels.layout import KVFormat
from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import NUMERICS_VERSION
from tokenmill.kernels.tape import Tape
from tokenmill.kv.footprint import Footprint
from tokenmill.kv.manager import KVManager
from tokenmill.sampling.sampler import Sampler
from tokenmill.scheduler.pace import Pace
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler

CHECK_VARIABLE = "TOKENMILL_CHECK"
"""Environment variable: 1 checks every frame's owner whenever an engine is idle (slow; tests set it)."""


def build_engine(config: EngineConfig, loaded: Loaded | None = None, sampler: Sampler | None = None) -> Engine:
    """Load the model and reserve its memory. Raises `ModelFileError`, `ConfigError` or `KernelError`.

    loaded: the model if it is in memory already; of several engines that share it one can be in a step at a time. sampler: who
    turns logits into tokens; a measurement gives one that keeps them.
    """
    started = time.monotonic()
    loaded = loaded or load_model(config)
    return assemble(config, share(config, loaded, started), loaded.pool, sampler)


def assemble(config: EngineConfig, shared: Shared, pool: Pool, sampler: Sampler | None = None) -> Engine:
    """An engine of what is in memory already, and the memory that it has to itself; arguments and errors as of `build_engine`.

    Of several engines that share a pool one can be in a step at a time; with pools of their own they know nothing of each other.
    """
    assert shared.serves(config), "an engine shares what was loaded for one like it"
    started = time.monotonic()
    model = shared.model
    groups, layout, policy, identity = design_cache(config, model.config, shared.calibration)
    head_dim = model.program.shape.head_dim
    frame_bytes, wide_frame_bytes = layout.frame_bytes(head_dim), layout.slots * KVFormat().frame_bytes(head_dim)
    budget = RequestBudget.of(config, frame_bytes, len(groups))
    drafter = None if config.speculative_config.model is None else shared.drafter
    pool_bytes = frame_bytes + (0 if drafter is None else drafter.frame_bytes)  # a request's budget is of the target's alone
    capacity = plan_capacity(config, model.config.context, pool_bytes, Footprint.of(groups), available_memory())
    prompt_rows = config.chunk if config.enable_chunked_prefill else max(config.chunk, capacity.max_model_len)
    tape = Tape(
        model.program,
        model.weights,
        model.vectors,
        pool,
        max_rows=prompt_rows + config.max_batch_size,
        max_outputs=MAX_OUTPUTS,
        n_frames=capacity.n_frames,
        layout=layout,
        shared=config.kv_transfer_config is not None and config.kv_transfer_config.connector == "shm",
    )
    kv = KVManager(groups, capacity.n_frames, config.block_manager_config, policy)
    limits = Limits(config.max_batch_size, config.chunk, config.enable_chunked_prefill)
    sampler = sampler or Sampler(pool)
    speculator = build_speculator(config, drafter, pool, kv, sampler, MAX_OUTPUTS)
    info = EngineInfo(
        model=config.name,
        architecture=model.config.architecture,
        vocab_size=model.config.vocab,
        max_model_len=capacity.max_model_len,
        kv_tokens=capacity.n_tokens,
        kv_bytes=capacity.n_frames * pool_bytes,
        kv_bytes_per_token=frame_bytes * len(groups) // FRAME,
        kv_format=str(layout.format),
        kv_bytes_saved_per_token=(wide_frame_bytes - frame_bytes) * len(groups) // FRAME,
        max_batch_size=config.max_batch_size,
        chunk_size=config.chunk,
        threads=pool.threads,
        cpus=pool.cpus,
        kernels=pool.variant,
        proposer=None if speculator is None else speculator.name,
        draft_model=config.speculative_config.model_name,
        fingerprint=fingerprint(shared.digest.result(), pool.variant, identity),
        pid=os.getpid(),
        load_seconds=shared.seconds + time.monotonic() - started,
    )
    runner = Runner(tape, kv, sampler, model.config.vocab)
    checks = os.environ.get(CHECK_VARIABLE) == "1"
    transit = Transit(kv, limits.chunk)
    pace = None if config.longest_step is None else Pace(config.longest_step)
    scheduler = Scheduler(kv, limits, transit.give_way, pace)
    store, others = config.kv_store_config is not None, config.kv_transfer_config is not None
    filling = Filling(kv, info.fingerprint, store=store, router=others) if store or others else None
    return Engine(info, scheduler, runner, MonotonicClock(), budget, transit, speculator, filling, check_when_idle=checks)


def fingerprint(model_digest: bytes, variant: str, cache: str) -> str:
    """Digest of everything that decides the bits of an answer: model file, kernel variant, `CacheDesign.identity`, numerics version."""
    return hashlib.sha256(model_digest + f"{variant} {cache} {NUMERICS_VERSION}".encode()).hexdigest()
