"""Drafts where something is short or fails, and faults put into the room: they are seen."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
from comparison import Setting, Trial, serve
from drafting import METHODS, ask_an_oracle, drafted
from request_pool import RequestPool
from traffic import Arrival, Request

from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence as Running
from tokenmill.speculate import speculator
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.proposer import Wish, Worth
from tokenmill.weights.vocabulary import load_tokenizer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("any_length")
def test_a_draft_longer_than_what_is_left_changes_nothing(smollm2_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the context, and of `max_tokens`; the last token may take the last place."""
    monkeypatch.setattr(speculator, "choose_lengths", lambda odds, *_: [len(each) for each in odds])
    text = load_tokenizer(smollm2_path).encode("one two three four " * 9)
    settings: dict[str, Any] = {"model": str(smollm2_path), "max_model_len": 64, "max_batch_size": 4}
    settings["kv_cache_config"] = {"memory_budget_gb": 0.02}
    chosen = {"method": method, "num_speculative_tokens": 48} | ({"model": str(smollm2_path)} if method in ("draft", "combined") else {})
    plain, drafting = (build_engine(EngineConfig.from_settings(**settings | more)) for more in ({}, {"speculative_config": chosen}))
    requests = [
        Request(tuple(text[:length]), SamplingParams(temperature=0.3 * (room % 2), seed=room, max_tokens=room, ignore_eos=True), ())
        for length in (16, 24, 32)
        for room in (1, 2, 3, 5, 8, 13, 21, 64 - length - 1, 64 - length)
    ]
    mix = [Arrival(i, 2 * i, 1, "", None, None) for i in range(len(requests))]
    wanted, found = serve(plain, requests, mix), serve(drafting, requests, mix)
    for i, request in enumerate(requests):
        assert len(wanted[i, 0].tokens) == request.params.max_tokens
        assert (found[i, 0].tokens, found[i, 0].finish_reason) == (wanted[i, 0].tokens, wanted[i, 0].finish_reason)
    assert drafting.speculator is not None
    longest = len(drafting.speculator.total.drafted)
    assert longest == 64 - 16 - 2, "beside the token that the step draws, and behind the one that the prompt's step drew"


class Wrong:
    """Never right, though it knows the answers, by their prompts."""

    name = "wrong"
    writes = False
    invested = 0.0

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        return [self._draft(wish) for wish in wishes]

    def forget(self, key: Hashable) -> None:
        pass

    def _draft(self, wish: Wish) -> Draft:
        rest = self._answers[tuple(wish.token_ids[: wish.prompt_len])][len(wish.token_ids) - wish.prompt_len :]
        return Draft(tuple(token ^ 1 for token in rest[: wish.most]), (0.9,) * min(len(rest), wish.most))


@pytest.mark.usefixtures("any_length")
def test_nobody_is_preempted_for_a_draft(pool: RequestPool, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts that are never right an engine of little memory does what it does without, step by step."""
    tokenizer, params = load_tokenizer(smollm2_path), SamplingParams(temperature=0, seed=0, max_tokens=70, ignore_eos=True)
    prompts = [
        tokenizer.encode(f"{place} is a place where people like to" + " go" * i)
        for i, place in enumerate(("Rome", "Lima", "Oslo", "Bonn", "Kyiv"))
    ]
    requests = [Request(tuple(prompt), params, ()) for prompt in prompts]
    monkeypatch.setattr(speculator, "choose_lengths", lambda odds, *_: [len(each) for each in odds])
    given: list[tuple[int, int]] = []
    lend = Scheduler.lend

    def lending(scheduler: Scheduler, sequence: Running, wanted: int) -> int:
        given.append((wanted, lend(scheduler, sequence, wanted)))
        return given[-1][1]

    monkeypatch.setattr(Scheduler, "lend", lending)
    for sharing in (True, False):
        engines = [
            Setting(5, frames=24, sharing=sharing, drafts=who).build(smollm2_path, {}, pool.alone.info.kv_bytes_per_token)
            for who in ("none", "ngram")
        ]
        assert engines[1].speculator is not None
        engines[1].speculator._proposer = Wrong({request.prompt: pool.alone.tokens(request) for request in requests})
        mix = [Arrival(i % 5, 3 * i, 1, "", None, None) for i in range(10)]
        for engine in engines:
            for (i, _), answer in serve(engine, requests, mix).items():
                assert answer.tokens == pool.alone.tokens(requests[mix[i].request])
        plain, drafting = (engine.stats() for engine in engines)
        assert (drafting.preemptions, drafting.steps) == (plain.preemptions, plain.steps)
        assert plain.preemptions > 5
        verified, right = drafted(engines[1])
        assert verified > 500
        assert right == 0
        assert any(0 < got < wanted for wanted, got in given), "the frames that it has are its own to draft in"


@pytest.mark.usefixtures("any_length")
def test_drafting_that_fails_leaves_no_trace(pool: RequestPool, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is planned again, and penalties have not seen what was drafted for it."""
    penalised = SamplingParams(temperature=0, seed=1, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.7, ignore_eos=True)
    request = Request(pool.talkative[0].prompt, penalised, ())
    engine = Setting(max_batch_size=2, drafts="draft").build(smollm2_path, {}, pool.alone.info.kv_bytes_per_token)
    draw, calls = DraftModel._draw, 0

    def failing(model: DraftModel, logits: object, writings: list[object]) -> object:
        nonlocal calls
        calls += 1
        if calls % 17 == 3:  # a step draws twelve times at most, so that one that is planned again comes through
            raise MemoryError("no memory to draw with")
        return draw(model, logits, writings)

    monkeypatch.setattr(DraftModel, "_draw", failing)
    engine.add(Generate(request_id="a", prompt=list(request.prompt), params=penalised))
    tokens, failures = [], 0
    while engine.has_work:
        try:
            tokens += [token for output in engine.step() for token in output.tokens]
        except MemoryError:
            failures += 1
    assert failures > 1
    assert tokens == pool.alone.tokens(request)
    assert not engine._scheduler._lent


def say_that_all_is_right(patch: pytest.MonkeyPatch) -> None:
    from tokenmill.sampling.sampler import Sampler

    sample = Sampler.sample

    def generous(sampler: Sampler, logits: object, draws: list[object], *stream: int) -> list[list[int]]:
        found = sample(sampler, logits, draws, *stream)
        return [
            [*draw.draft[:1], tokens[0]] if len(tokens) == 1 and draw.draft else tokens for draw, tokens in zip(draws, found, strict=True)
        ]

    patch.setattr(Sampler, "sample", generous)


def draw_for_the_wrong_position(patch: pytest.MonkeyPatch) -> None:
    from tokenmill.engine import runner
    from tokenmill.sampling.sampler import Draw

    patch.setattr(runner, "Draw", lambda row, state, position, draft: Draw(row, state, position + bool(draft), draft))


@pytest.mark.parametrize("fault", [say_that_all_is_right, draw_for_the_wrong_position])
@pytest.mark.usefixtures("any_length")
def test_a_fault_is_found(pool: RequestPool, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for request in pool.talkative:
        pool.alone.answers(request)
    fault(monkeypatch)
    trial = Trial(pool.alone, Setting(drafts="ngram"))
    ask_an_oracle(trial.engine, pool)
    assert any(trial.differences(pool.talkative, arrivals=6) for _ in range(2))
