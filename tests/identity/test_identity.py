"""One request, one answer: tokens and log-probabilities, bit for bit, whatever runs beside a request and however it is served.

A case is one choice of one request, served in a mix and compared with its run alone. What a failure prints (setting, arrival,
request) and the test's id (the seeds) are enough to replay it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from comparison import Alone, Setting, Trial
from tokenmill.kernels.native import VARIANT_VARIABLE, variants
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer
from traffic import Request, Traffic, long, short

CORNERS = {
    "defaults": Setting(),
    "one at a time": Setting(max_batch_size=1),
    "small chunks": Setting(max_batch_size=8, chunk_size=16, threads=1, block_size=8),
    "whole prompts": Setting(max_batch_size=5, chunk_size=64, chunked=False, block_size=64, threads=3),
    "large chunks": Setting(chunk_size=2048, block_size=32),
    "no sharing": Setting(max_batch_size=7, chunk_size=100, sharing=False, block_size=16, threads=1),
    "tiny cache": Setting(chunk_size=48, frames=24),
    "tiny cache, large pages": Setting(max_batch_size=6, frames=24, block_size=64, threads=1),
    "tiny cache, no sharing": Setting(max_batch_size=9, chunk_size=128, frames=32, sharing=False),
}


class Pool:
    """A model's requests, with the answers that they get alone."""

    def __init__(self, model: Path, seed: int, n_short: int, n_long: int) -> None:
        self.alone = Alone(model)
        self.traffic = Traffic(seed, load_tokenizer(model))
        self.short = self.traffic.requests(n_short, short, self.alone.tokens)
        self.long = self.traffic.requests(n_long, long, self.alone.tokens, longest=16)

    def trial(self, setting: Setting, requests: list[Request], mixes: int, arrivals: int) -> Trial:
        """Serve mixes of the requests under a setting, and compare."""
        trial = Trial(self.alone, setting)
        for _ in range(mixes):
            mix = self.traffic.mix(requests, arrivals, trial.engine.info.max_model_len)
            assert not (found := trial.differences(requests, mix)), "\n".join(found)
        return trial


@pytest.fixture(scope="module")
def pool(smollm2_path: Path) -> Pool:
    return Pool(smollm2_path, seed=1, n_short=60, n_long=8)


@pytest.mark.parametrize("name", CORNERS)
def test_short_requests_are_answered_as_alone(pool: Pool, name: str) -> None:
    setting = CORNERS[name]
    stats = pool.trial(setting, pool.short, mixes=2, arrivals=14).engine.stats()
    if setting.frames <= 32:
        assert stats.preemptions > 0, "the cache is not tiny enough: nothing was preempted"
        assert stats.evictions > 0 or not setting.sharing, "the cache is not tiny enough: nothing was evicted"
    elif setting.sharing:
        assert stats.prefix_hits > 0, "nothing was found in the cache"


@pytest.mark.parametrize(
    "setting",
    [
        Setting(chunk_size=2048, threads=1),
        Setting(max_batch_size=3, chunk_size=300, block_size=8),
        Setting(max_batch_size=4, chunk_size=500, frames=160, threads=3),
    ],
    ids=str,
)
def test_long_requests_are_answered_as_alone(pool: Pool, setting: Setting) -> None:
    pool.trial(setting, pool.long, mixes=1, arrivals=6)


def test_a_run_alone_is_that_of_a_fresh_engine(pool: Pool) -> None:
    for request in random.Random(2).sample(pool.short, 4):
        for choice, answer in enumerate(pool.alone.answers(request)):
            assert pool.alone.fresh(request, choice) == answer, request


@pytest.mark.parametrize("variant", ["avx2", "portable"])
def test_every_kernel_variant_answers_as_alone(smollm2_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = variant_pool(smollm2_path, variant, monkeypatch, n_short=8, n_long=0)
    pool.trial(Setting(max_batch_size=6, chunk_size=24, threads=1), pool.short, mixes=1, arrivals=8)


def variant_pool(model: Path, variant: str, monkeypatch: pytest.MonkeyPatch, n_short: int, n_long: int) -> Pool:
    if variant not in variants():
        pytest.skip(f"this CPU cannot run {variant}")
    monkeypatch.setenv(VARIANT_VARIABLE, variant)
    pool = Pool(model, 3, n_short, n_long)
    assert pool.alone.info.kernels == variant
    return pool


def search(pool: Pool, seed: int, cases: int) -> None:
    """Random settings, mostly warm engines, until that many cases have been compared."""
    rng = random.Random(seed)
    done = preemptions = evictions = 0
    while done < cases:
        setting = Setting.draw(rng)
        requests = pool.short if setting.frames < 100 else pool.long if rng.random() < 0.2 else [*pool.short, *pool.long[:3]]
        trial = pool.trial(setting, requests, mixes=3, arrivals=rng.randrange(4, 20))
        stats = trial.engine.stats()
        done += trial.cases
        preemptions += stats.preemptions
        evictions += stats.evictions
    print(f"{pool.alone.info.model}, {pool.alone.info.kernels}: {done} cases, {preemptions} preemptions, {evictions} evictions")
    assert preemptions > 0
    assert evictions > 0


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(10, 15))
def test_two_thousand_cases(smollm2_path: Path, seed: int) -> None:
    search(Pool(smollm2_path, seed, n_short=90, n_long=14), seed, cases=420)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["qwen2.5-coder:0.5b", "gemma3:270m"])
def test_other_models_answer_as_alone(name: str) -> None:
    search(Pool(resolve(name), 20, n_short=50, n_long=10), 20, cases=240)


@pytest.mark.heavy
@pytest.mark.parametrize("variant", ["avx2", "portable"])
def test_every_kernel_variant_answers_as_alone_at_length(smollm2_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search(variant_pool(smollm2_path, variant, monkeypatch, n_short=40, n_long=4), 30, cases=150)
