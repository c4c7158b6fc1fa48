"""Promise 1 with compressed keys and values, and with sequences that give up part of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparison import Setting, Trial
from request_pool import RequestPool

from tokenmill.core.kv_spelling import Format, Sparsity, kv_settings
from tokenmill.engine import runner
from tokenmill.kernels.native import VARIANT_VARIABLE, variants
from tokenmill.kernels.ops import Segment
from tokenmill.scheduler.sequence import Sequence
from tokenmill.weights.catalogue import resolve

FORMATS = ("int8/int8", "int8/int4", "int4/int4:32", "bf16/int4:plain", "int8/bf16")
LEVELS = ("topk_heads:0.7", "topk_heads:0", "topk_positions:0.7", "topk_positions:0")

SETTINGS = {
    "small chunks and pages": Setting(max_batch_size=5, chunk_size=40, block_size=8, frames=200, threads=1),
    "dynamic pages": Setting(chunk_size=2048, frames=512),
    "a small cache of large pages": Setting(max_batch_size=3, chunk_size=300, block_size=64, frames=170, threads=3),
    "no sharing": Setting(max_batch_size=7, chunk_size=100, sharing=False, block_size=16, frames=300),
}


def settings(kv: str, sparse: str | None = None) -> dict[str, Any]:
    return kv_settings(Format.parse(kv), None if sparse is None else Sparsity.parse(sparse), None)


@pytest.mark.parametrize("kv", FORMATS)
def test_every_format_answers_as_alone(smollm2_path: Path, kv: str) -> None:
    pool = RequestPool(smollm2_path, 4, n_short=8, n_talkative=0, n_long=1, cache=settings(kv))
    for name in ("small chunks and pages", "dynamic pages"):
        stats = pool.trial(SETTINGS[name], [*pool.short, *pool.long], mixes=1, arrivals=10).engine.stats()
        assert stats.prefix_hits > 0, "nothing was found in the cache"


@pytest.mark.parametrize("level", LEVELS)
def test_sparsified_sequences_answer_as_alone(smollm2_path: Path, level: str) -> None:
    """Their points lie in the prompt, and for some requests in the answer; some are preempted behind their point and climb again."""
    pool = RequestPool(smollm2_path, 6, n_short=4, n_talkative=0, n_long=3, cache=settings("int8/int4", level), budgets=True)
    sparsified = [request for request in pool.long if pool.alone.answers(request)[0].sparsified_from is not None]
    assert sparsified, "no budget was used up"
    for name in ("small chunks and pages", "a small cache of large pages"):
        pool.trial(SETTINGS[name], [*sparsified, *pool.short[:2]], mixes=1, arrivals=5)


def see_all_that_is_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner, "Segment", lambda *fields: Segment(*fields)._replace(sparse=False))


def weigh_the_latest_rows_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "weigh", lambda sequence, weights: setattr(sequence, "weights", weights))


@pytest.mark.parametrize(("fault", "level"), [(see_all_that_is_left, "topk_heads:0.5"), (weigh_the_latest_rows_only, "topk_positions:0.5")])
def test_a_fault_is_found(
    smollm2_path: Path, fault: Callable[[pytest.MonkeyPatch], None], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what a step says of sparse rows, and in how weights are gathered over steps."""
    pool = RequestPool(smollm2_path, 6, n_short=0, n_talkative=0, n_long=2, cache=settings("bf16", level), budgets=True)
    for request in pool.long:
        pool.alone.answers(request)
    fault(monkeypatch)
    trial = Trial(pool.alone, Setting(chunk_size=24))
    assert any(trial.differences(pool.long, arrivals=3) for _ in range(2))


@pytest.mark.heavy
@pytest.mark.parametrize("kv", ["bf16", *FORMATS, "int8/int8:plain"])
def test_every_format_answers_as_alone_in_many_cases(smollm2_path: Path, kv: str) -> None:
    RequestPool(smollm2_path, 40, n_short=40, n_talkative=8, n_long=4, cache=settings(kv)).search(40, cases=250)


@pytest.mark.heavy
@pytest.mark.parametrize("kv", ["bf16", "int8/int4", "int4/int4"])
@pytest.mark.parametrize("level", LEVELS)
def test_sparsified_sequences_answer_as_alone_in_many_cases(smollm2_path: Path, kv: str, level: str) -> None:
    pool = RequestPool(smollm2_path, 50, n_short=10, n_talkative=0, n_long=16, cache=settings(kv, level), budgets=True)
    preempted = 0
    for seed, setting in enumerate(SETTINGS.values()):
        trial = pool.trial(setting, [*pool.long, *pool.short[:5]], mixes=2, arrivals=12, seed=seed)
        preempted += trial.engine.stats().preemptions
    assert preempted, "nothing was preempted"


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["qwen2.5-coder:0.5b", "gemma3:270m"])
@pytest.mark.parametrize("level", [None, "topk_heads:0.5", "topk_positions:0.5"])
def test_other_models_answer_as_alone(name: str, level: str | None) -> None:
    cache = settings("int8/int4", level)
    pool = RequestPool(resolve(name), 60, n_short=8, n_talkative=0, n_long=6, cache=cache, budgets=level is not None)
    for setting in SETTINGS.values():
        pool.trial(setting, [*pool.long, *pool.short], mixes=1, arrivals=12)


@pytest.mark.heavy
@pytest.mark.parametrize("variant", ["avx2", "portable"])
def test_every_kernel_variant_answers_as_alone(smollm2_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variant not in variants():
        pytest.skip(f"this CPU cannot run {variant}")
    monkeypatch.setenv(VARIANT_VARIABLE, variant)
    cache = settings("int8/int4", "topk_positions:0.6")
    pool = RequestPool(smollm2_path, 70, n_short=6, n_talkative=0, n_long=2, cache=cache, budgets=True)
    assert pool.alone.info.kernels == variant
    pool.trial(SETTINGS["small chunks and pages"], [*pool.long, *pool.short], mixes=1, arrivals=8)
