"""The comparison finds the faults that it is there to find: each is put into an engine on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from comparison import Setting, Trial
from request_pool import RequestPool

from tokenmill.core.types import FRAME
from tokenmill.engine.engine import Engine
from tokenmill.kv import prefix_tree
from tokenmill.kv.prefix_tree import PrefixHit
from tokenmill.sampling.sampler import Draw
from tokenmill.sampling.state import SamplerState

Patch = pytest.MonkeyPatch


def noise_by_row_of_the_batch(engine: Engine, patch: Patch) -> None:
    sampler = engine._runner._sampler
    sample = sampler.sample

    def drawing(logits: Any, draws: Sequence[Draw]) -> list[int]:
        return sample(logits, [Draw(d.row, d.state, d.position + d.row) for d in draws])

    patch.setattr(sampler, "sample", drawing)


def noise_from_one_stream(engine: Engine, patch: Patch) -> None:
    sampler = engine._runner._sampler
    sample = sampler.sample
    drawn = 0

    def drawing(logits: Any, draws: Sequence[Draw]) -> list[int]:
        nonlocal drawn
        drawn += len(draws)
        return sample(logits, [Draw(d.row, d.state, d.position + drawn) for d in draws])

    patch.setattr(sampler, "sample", drawing)


def log_probability_off_by_one_bit_in_large_batches(engine: Engine, patch: Patch) -> None:
    sampler = engine._runner._sampler
    likelihoods = sampler.likelihoods

    def nudged(logits: Any, questions: Any) -> Any:
        found = likelihoods(logits, questions)
        return [msgspec.structs.replace(f, logprob=math.nextafter(f.logprob, 0)) for f in found] if len(logits) > 4 else found

    patch.setattr(sampler, "likelihoods", nudged)


def position_off_by_one_behind_another_segment(engine: Engine, patch: Patch) -> None:
    runner = engine._runner
    arrange = runner._arrange

    def shifted(step: Any) -> Any:
        batch, *rest = arrange(step)
        segments = [s._replace(position=s.position - (i > 0 and s.position > 0)) for i, s in enumerate(batch.segments)]
        return replace(batch, segments=segments), *rest

    patch.setattr(runner, "_arrange", shifted)


def noise_restarts_when_a_sequence_is_preempted(engine: Engine, patch: Patch) -> None:
    scheduler, sampler = engine._scheduler, engine._runner._sampler
    schedule, sample = scheduler.schedule, sampler.sample
    start: dict[SamplerState, int] = {}

    def restarting(now: float) -> Any:
        running = [s for s in engine._generations if s.running]
        before = scheduler.n_preemptions
        step = schedule(now)
        for sequence in running if scheduler.n_preemptions > before else ():
            if not sequence.running:
                start[engine._generations[sequence].sampler] = sequence.target
        return step

    def drawing(logits: Any, draws: Sequence[Draw]) -> list[int]:
        return sample(logits, [Draw(d.row, d.state, d.position - start.get(d.state, 0)) for d in draws])

    patch.setattr(scheduler, "schedule", restarting)
    patch.setattr(sampler, "sample", drawing)


def cache_compares_all_but_a_frames_last_token(engine: Engine, patch: Patch) -> None:
    encode = prefix_tree._encode
    patch.setattr(prefix_tree, "_encode", lambda tokens: encode([0 if i % FRAME == FRAME - 1 else t for i, t in enumerate(tokens)]))


def a_hit_reaches_one_frame_too_far(engine: Engine, patch: Patch) -> None:
    kv = engine._scheduler.kv
    match, acquire = kv.match, kv.acquire

    def further(tokens: Sequence[int], found: int) -> bool:
        return 0 < found < (len(tokens) - 1) // FRAME

    def match_further(tokens: Sequence[int], salt: str, limit: int | None) -> PrefixHit:
        hit = match(tokens, salt, limit)
        more = further(tokens, hit.frames)
        return PrefixHit(hit.frames + more, hit.idle, hit.held + more)

    def acquire_further(seq_id: Any, tokens: Sequence[int], salt: str, limit: int | None) -> int:
        found = acquire(seq_id, tokens, salt, limit)
        if further(tokens, found // FRAME):
            kv.tables(seq_id)[0].append(*kv._store._pool.allocate(1))
            return found + FRAME
        return found

    patch.setattr(kv, "match", match_further)
    patch.setattr(kv, "acquire", acquire_further)


def cache_serves_another_salts_prefix(engine: Engine, patch: Patch) -> None:
    kv = engine._scheduler.kv
    match, acquire = kv.match, kv.acquire
    patch.setattr(kv, "match", lambda tokens, salt, limit: match(tokens, "", limit))
    patch.setattr(kv, "acquire", lambda seq_id, tokens, salt, limit: acquire(seq_id, tokens, "", limit))


ROOMY, TINY = Setting(chunk_size=100), Setting(frames=20)

FAULTS: list[tuple[Callable[[Engine, Patch], None], Setting]] = [
    (noise_by_row_of_the_batch, ROOMY),
    (noise_from_one_stream, ROOMY),
    (log_probability_off_by_one_bit_in_large_batches, ROOMY),
    (position_off_by_one_behind_another_segment, ROOMY),
    (noise_restarts_when_a_sequence_is_preempted, TINY),
    (cache_compares_all_but_a_frames_last_token, ROOMY),
    (a_hit_reaches_one_frame_too_far, ROOMY),
    (cache_serves_another_salts_prefix, ROOMY),
]


@pytest.mark.parametrize(("fault", "setting"), FAULTS, ids=[fault.__name__.replace("_", " ") for fault, _ in FAULTS])
def test_a_fault_is_found(pool: RequestPool, fault: Callable[[Engine, Patch], None], setting: Setting, monkeypatch: Patch) -> None:
    trial = Trial(pool.alone, setting)
    fault(trial.engine, monkeypatch)
    requests = pool.talkative if setting is TINY else pool.short
    for _ in range(20):
        if trial.differences(requests, arrivals=9):
            return
    pytest.fail(f"{trial.cases} cases were compared, and the fault was not seen")
