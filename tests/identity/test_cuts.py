"""Promise 1 across engines: an answer that is cut off and goes on elsewhere, from its tokens alone, is that of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from comparison import Setting, Trial
from request_pool import RequestPool

from tokenmill.core.kv_spelling import Format, Sparsity, kv_settings
from tokenmill.weights.catalogue import resolve

SETTINGS = {
    "defaults": Setting(cuts=True),
    "small chunks and pages": Setting(max_batch_size=6, chunk_size=24, block_size=8, threads=1, cuts=True),
    "no sharing": Setting(max_batch_size=7, chunk_size=300, sharing=False, block_size=64, threads=3, cuts=True),
    "drafts": Setting(drafts="suffix", cuts=True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_that_was_cut_off_goes_on_as_if_it_had_not(pool: RequestPool, name: str) -> None:
    trial = pool.trial(SETTINGS[name], pool.short, mixes=2, arrivals=16)
    assert trial.cuts > 10


def test_in_a_cache_too_small_for_all(pool: RequestPool) -> None:
    trial = pool.trial(Setting(max_batch_size=6, frames=20, cuts=True), pool.talkative, mixes=3, arrivals=9)
    assert trial.cuts > 10
    assert trial.engine.stats().preemptions > 0


@pytest.mark.parametrize("level", ["topk_heads:0.5", "topk_positions:0.5"])
def test_behind_points_of_a_budget(smollm2_path: Path, level: str) -> None:
    """What was given up is given up again on the way."""
    cache = kv_settings(Format.parse("int8/int4"), Sparsity.parse(level), None)
    pool = RequestPool(smollm2_path, seed=3, n_short=0, n_talkative=0, n_long=4, cache=cache, budgets=True)
    trial = Trial(pool.alone, Setting(chunk_size=256, cuts=True))
    while not trial.cuts:
        assert not (found := trial.differences(pool.long, arrivals=4)), "\n".join(found)
    assert trial.engine.stats().kv_sparsified > 0


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["smollm2:135m", "gemma3:270m", "qwen2.5-coder:0.5b"])
@pytest.mark.parametrize("seed", range(3))
def test_other_models_and_more_cuts(model: str, seed: int) -> None:
    pool = RequestPool(resolve(model), seed, n_short=20, n_talkative=6, n_long=3)
    for name, setting in SETTINGS.items():
        trial = pool.trial(replace(setting, frames=200), [*pool.short, *pool.long], mixes=2, arrivals=12, seed=seed)
        assert trial.cuts > 3, name
