"""How large the KV pool becomes: a pure decision."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.core.config import DEFAULT_SHARE, EngineConfig, KVCacheConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.memory import available_memory
from tokenmill.core.types import FRAME
from tokenmill.engine.memory import Capacity, plan_capacity
from tokenmill.kv.footprint import Footprint

GIB = 2**30
ONE_GROUP = Footprint(whole=1, streaming=0, sinks=0, recent=0, windows=())
TOKEN = 2**15
"""Bytes of one position: a GiB holds 32,768 tokens, 4,096 frames."""


def plan(
    context: int = 8192, available: int = 8 * GIB, budget: float | None = None, footprint: Footprint = ONE_GROUP, **settings: Any
) -> Capacity:
    config = EngineConfig(model="m", kv_cache_config=KVCacheConfig(memory_budget_gb=budget), **settings)
    return plan_capacity(config, context, TOKEN * FRAME, footprint, available)


def test_a_budget_is_cut_into_whole_frames():
    assert plan(budget=1.0) == Capacity(4096, 8192, 32768)
    assert plan(budget=1.0 - 1e-6).n_frames == 4095


def test_without_a_budget_a_share_of_what_is_available_is_taken():
    assert plan().n_frames == 8 * 4096 * DEFAULT_SHARE
    assert plan(gpu_memory_utilization=0.5).n_frames == 8 * 4096 * 0.5
    assert plan(gpu_memory_utilization=0.5, budget=1.0).n_frames == 4096, "a budget goes first"


def test_no_more_is_taken_than_the_largest_batch_of_the_longest_sequences_needs():
    assert plan(budget=8.0, max_batch_size=2, max_model_len=100) == Capacity(2 * (13 + 1), 100, 2 * 14 * FRAME)


def test_the_context_is_the_models_unless_the_pool_is_smaller():
    assert plan(context=4000, budget=1.0).max_model_len == 4000
    assert plan(context=100_000, budget=1.0).max_model_len == 4096 * FRAME
    assert plan(context=100_000, budget=1.0, max_model_len=512).max_model_len == 512


def test_a_length_that_just_fits_is_served_and_one_token_more_refused():
    budget = 10 * FRAME * TOKEN / GIB
    assert plan(budget=budget, max_model_len=80) == Capacity(10, 80, 80)
    numbers = r"holds 80 tokens, but max_model_len is 81: raise memory_budget_gb to 0\.003 or lower max_model_len"
    with pytest.raises(ConfigError, match=numbers):
        plan(budget=budget, max_model_len=81)


def test_what_one_sequence_could_have_is_not_shortened_by_windows_nor_by_the_context():
    """Five groups see 512 tokens each, and a step's rows: 5 x 130 frames whatever the length, and a frame for each 8 tokens."""
    gemma = Footprint(whole=1, streaming=0, sinks=0, recent=0, windows=((512, 5),))
    found = plan(budget=1.0, footprint=gemma)
    assert found.n_tokens == (found.n_frames - 5 * ((512 + 512 + 13) // FRAME)) * FRAME > found.max_model_len
    assert plan(budget=0.01, footprint=gemma).n_tokens == 40 // 6 * FRAME, "below the window all groups grow alike"
    assert plan(budget=1.0, footprint=Footprint(0, 0, 0, 0, ((512, 4),))).n_tokens == 4096 // 4 * FRAME, "there is no longest"


def test_impossible_settings_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="max_model_len is 9000, but the model's context is 8192"):
        plan(max_model_len=9000)
    with pytest.raises(ConfigError, match=r"memory_budget_gb is 9\.0, but only 8\.0 GB are available"):
        plan(budget=9.0)
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        plan(budget=1e-5)
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        plan(available=0)


def test_this_machine_has_memory():
    assert 2**26 < available_memory() < 2**50
