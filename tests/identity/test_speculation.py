"""Promise 1 with drafts: every answer is that without, whoever drafts and however much of it is verified."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from comparison import Setting, Trial, serve
from drafting import METHODS, ask_an_oracle, drafted
from request_pool import RequestPool
from traffic import Arrival, Request

from tokenmill.core.config import EngineConfig
from tokenmill.core.kv_spelling import Format, Sparsity, kv_settings
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.kernels.native import VARIANT_VARIABLE, variants
from tokenmill.weights.catalogue import resolve

SETTINGS = {
    "defaults": Setting(),
    "small chunks and pages": Setting(max_batch_size=6, chunk_size=24, block_size=8, threads=1),
    "large pages, no sharing": Setting(max_batch_size=7, chunk_size=300, block_size=64, sharing=False, threads=3),
}
TINY = Setting(max_batch_size=6, chunk_size=48, frames=20)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("any_length")
def test_drafts_right_and_wrong_change_no_answer(pool: RequestPool, name: str) -> None:
    trial = Trial(pool.alone, Setting(**{**vars(SETTINGS[name]), "drafts": "ngram"}))
    ask_an_oracle(trial.engine, pool)
    for requests, arrivals in ((pool.short, 18), (pool.long, 4), (pool.talkative, 9)):
        assert not (found := trial.differences(requests, arrivals)), "\n".join(found)
    verified, right = drafted(trial.engine)
    assert min(right, verified - right) > 50, (verified, right)


@pytest.mark.usefixtures("any_length")
def test_a_cache_too_small_for_all_changes_no_answer(pool: RequestPool) -> None:
    trial = Trial(pool.alone, Setting(**{**vars(TINY), "drafts": "ngram"}))
    ask_an_oracle(trial.engine, pool)
    for _ in range(8):
        assert not (found := trial.differences(pool.talkative, arrivals=9)), "\n".join(found)
        stats, (_, right) = trial.engine.stats(), drafted(trial.engine)
        if stats.preemptions and stats.evictions and right > 100:
            return
    pytest.fail(f"the cache is not small enough for that, or too little was drafted: {stats}, {right}")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("any_length")
def test_every_proposer_leaves_answers_as_they_are(pool: RequestPool, method: str) -> None:
    trial = Trial(pool.alone, Setting(max_batch_size=5, drafts=method))
    for requests, arrivals in ((pool.talkative, 9), ([*pool.short[:8], *pool.long[:2]], 8)):
        assert not (found := trial.differences(requests, arrivals)), "\n".join(found)
    verified, right = drafted(trial.engine)
    assert right > 5, (verified, right)
    assert verified - right > 20 or method in ("draft", "combined"), (verified, right)


@pytest.mark.usefixtures("any_length", "one_mind")
def test_a_model_that_drafts_for_itself_is_always_right(pool: RequestPool) -> None:
    """Its frames are the target's, hits and preemptions included: what it says is wrong only if what it sees is."""
    trial = Trial(pool.alone, Setting(max_batch_size=4, frames=24, drafts="draft"))
    for _ in range(2):
        assert not (found := trial.differences(pool.talkative, arrivals=8)), "\n".join(found)
    stats, (verified, right) = trial.engine.stats(), drafted(trial.engine)
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert right > 0.97 * verified > 100, (verified, right)


@pytest.mark.usefixtures("any_length", "one_mind")
def test_by_rejection_greedy_answers_stay_and_a_model_of_the_same_mind_is_believed(pool: RequestPool, smollm2_path: Path) -> None:
    """Drawn at a temperature, tokens are others than without drafts; where both models have one mind none is rejected."""
    chosen = {"model": str(smollm2_path), "verify": "rejection", "num_speculative_tokens": 5}
    engine = build_engine(EngineConfig.from_settings(model=str(smollm2_path), max_batch_size=2, speculative_config=chosen))
    for request in [r for r in pool.talkative + pool.short if r.params.temperature == 0][:3]:
        arrival = Arrival(0, 0, 1, "", None, None)
        answers = serve(engine, [request], [arrival])
        assert [answers[0, choice].tokens for choice in range(request.params.n)] == [a.tokens for a in pool.alone.answers(request)]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    warm = Request(pool.talkative[0].prompt, params, ())
    before = drafted(engine)
    tokens = serve(engine, [warm], [Arrival(0, 0, 1, "", None, None)])[0, 0].tokens
    verified, right = (now - then for now, then in zip(drafted(engine), before, strict=True))
    assert right == verified > 30
    assert tokens != pool.alone.answers(warm)[0].tokens
    assert len(tokens) == 60


@pytest.mark.parametrize("level", ["topk_heads:0.5", "topk_positions:0.5"])
@pytest.mark.usefixtures("any_length")
def test_sparsified_and_compressed_sequences_answer_as_without_drafts(smollm2_path: Path, level: str) -> None:
    cache = kv_settings(Format.parse("int8/int4"), Sparsity.parse(level), None)
    pool = RequestPool(smollm2_path, 6, n_short=3, n_talkative=0, n_long=3, cache=cache, budgets=True)
    trial = Trial(pool.alone, Setting(max_batch_size=3, chunk_size=300, frames=300, drafts="ngram"))
    ask_an_oracle(trial.engine, pool)
    assert not (found := trial.differences([*pool.long, *pool.short], arrivals=6)), "\n".join(found)
    assert drafted(trial.engine)[1] > 20


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("any_length")
def test_drafts_of_any_length_under_settings_drawn_at_random(smollm2_path: Path, seed: int) -> None:
    rng, pool = random.Random(seed), RequestPool(smollm2_path, 80 + seed, n_short=24, n_talkative=8, n_long=3)
    for method in METHODS:
        setting = replace(Setting.draw(rng), drafts=method, draft_tokens=rng.randrange(1, 13))
        pool.trial(setting, [*pool.talkative, *pool.short, *pool.long], mixes=2, arrivals=16, seed=seed)


@pytest.mark.heavy
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["qwen2.5-coder:0.5b", "gemma3:270m"])
@pytest.mark.usefixtures("any_length")
def test_other_models_answer_as_without_drafts(name: str, method: str) -> None:
    pool = RequestPool(resolve(name), 90, n_short=8, n_talkative=4, n_long=3)
    for setting in SETTINGS.values():
        pool.trial(replace(setting, drafts=method), [*pool.talkative, *pool.short, *pool.long], mixes=1, arrivals=12)


@pytest.mark.heavy
@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("method", ["draft", "combined"])
def test_a_small_model_drafts_for_a_large_one(method: str, natural: bool, request: pytest.FixtureRequest) -> None:
    if not natural:
        request.getfixturevalue("any_length")
    pool = RequestPool(resolve("qwen2.5-coder:1.5b"), 95, n_short=6, n_talkative=4, n_long=1)
    setting = Setting(max_batch_size=3, frames=200, drafts=method, drafter=resolve("qwen2.5-coder:0.5b"))
    trial = pool.trial(setting, [*pool.talkative, *pool.short, *pool.long], mixes=3, arrivals=10)
    verified, right = drafted(trial.engine)
    assert natural or right > 20, (verified, right)  # how much pays is the machine's affair


@pytest.mark.heavy
@pytest.mark.parametrize("variant", ["avx2", "portable"])
@pytest.mark.usefixtures("any_length")
def test_every_kernel_variant_answers_as_without_drafts(smollm2_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variant not in variants():
        pytest.skip(f"this CPU cannot run {variant}")
    monkeypatch.setenv(VARIANT_VARIABLE, variant)
    pool = RequestPool(smollm2_path, 97, n_short=8, n_talkative=4, n_long=0)
    assert pool.alone.info.kernels == variant
    for method in ("suffix", "draft"):
        pool.trial(Setting(max_batch_size=5, chunk_size=48, drafts=method), [*pool.talkative, *pool.short], mixes=1, arrivals=10)
