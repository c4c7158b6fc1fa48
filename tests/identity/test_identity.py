"""One request, one answer: tokens and log-probabilities, bit for bit, whatever runs beside a request and however it is served.

A case is one choice of one request, served in a mix and compared with its run alone. What a failure prints (setting, arrival,
request) and the test's id (the seeds) are enough to replay it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from comparison import Setting, Trial
from request_pool import RequestPool

from tokenmill.kernels.native import VARIANT_VARIABLE, variants
from tokenmill.weights.catalogue import resolve

CORNERS = {
    "defaults": Setting(),
    "one at a time": Setting(max_batch_size=1),
    "small chunks": Setting(max_batch_size=8, chunk_size=16, threads=1, block_size=8),
    "whole prompts": Setting(max_batch_size=5, chunk_size=64, chunked=False, block_size=64, threads=1),
    "large chunks, more threads than CPUs": Setting(chunk_size=2048, block_size=32, threads=3),
    "no sharing": Setting(max_batch_size=7, chunk_size=100, sharing=False, block_size=16, threads=1),
}

TINY = {
    "small chunks": Setting(chunk_size=48, frames=20),
    "large pages": Setting(max_batch_size=6, frames=20, block_size=64, threads=1),
    "no sharing": Setting(max_batch_size=9, chunk_size=128, frames=24, sharing=False),
}


@pytest.mark.parametrize("name", CORNERS)
def test_short_requests_are_answered_as_alone(pool: RequestPool, name: str) -> None:
    stats = pool.trial(CORNERS[name], pool.short, mixes=2, arrivals=18).engine.stats()
    assert stats.prefix_hits > 0 or not CORNERS[name].sharing, "nothing was found in the cache"


@pytest.mark.parametrize("name", TINY)
def test_a_cache_too_small_for_all_changes_no_answer(pool: RequestPool, name: str) -> None:
    trial = Trial(pool.alone, TINY[name])
    for _ in range(8):
        assert not (found := trial.differences(pool.talkative, arrivals=9)), "\n".join(found)
        stats = trial.engine.stats()
        if stats.preemptions and (stats.evictions or not TINY[name].sharing):
            return
    pytest.fail(f"the cache is not small enough for that: {stats}")


@pytest.mark.parametrize(
    "setting",
    [
        Setting(chunk_size=2048, threads=1),
        Setting(max_batch_size=3, chunk_size=300, block_size=8, frames=160),
    ],
    ids=["large chunks", "tiny cache"],
)
def test_long_requests_are_answered_as_alone(pool: RequestPool, setting: Setting) -> None:
    pool.trial(setting, pool.long, mixes=1, arrivals=6)


def test_a_run_alone_is_that_of_a_fresh_engine(pool: RequestPool) -> None:
    for request in random.Random(2).sample(pool.short, 3):
        for choice, answer in enumerate(pool.alone.answers(request)):
            assert pool.alone.fresh(request, choice) == answer, request


@pytest.mark.parametrize("variant", ["avx2", "portable"])
def test_every_kernel_variant_answers_as_alone(smollm2_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_under(variant, smollm2_path, monkeypatch, n_short=8, n_talkative=0, n_long=0)
    requests = sorted(pool.short, key=lambda request: request.length)[:4]
    pool.trial(Setting(max_batch_size=6, chunk_size=16, threads=1), requests, mixes=1, arrivals=6)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(10, 15))
def test_two_thousand_cases(smollm2_path: Path, seed: int) -> None:
    RequestPool(smollm2_path, seed, n_short=90, n_talkative=12, n_long=12).search(seed, cases=420)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["qwen2.5-coder:0.5b", "gemma3:270m"])
def test_other_models_answer_as_alone(name: str) -> None:
    RequestPool(resolve(name), 20, n_short=40, n_talkative=6, n_long=8).search(20, cases=220)


@pytest.mark.heavy
@pytest.mark.parametrize("variant", ["avx2", "portable"])
def test_every_kernel_variant_answers_as_alone_at_length(smollm2_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool_under(variant, smollm2_path, monkeypatch, n_short=30, n_talkative=5, n_long=3).search(30, cases=150)


def pool_under(variant: str, model: Path, monkeypatch: pytest.MonkeyPatch, n_short: int, n_talkative: int, n_long: int) -> RequestPool:
    """Requests of a model as this kernel variant answers them."""
    if variant not in variants():
        pytest.skip(f"this CPU cannot run {variant}")
    monkeypatch.setenv(VARIANT_VARIABLE, variant)
    pool = RequestPool(model, 3, n_short, n_talkative, n_long)
    assert pool.alone.info.kernels == variant
    return pool
