"""Promise 1 with drafts: every answer is that without, whoever drafts and however much of it is verified."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import Setting, Trial, serve
from request_pool import RequestPool
from traffic import Arrival, Request

from tokenmill.core.config import EngineConfig
from tokenmill.core.kv_spelling import Format, Sparsity, kv_settings
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.engine import Engine
from tokenmill.kernels.native import VARIANT_VARIABLE, variants
from tokenmill.models.loader import Model
from tokenmill.sampling.mask import Words
from tokenmill.sampling.state import SamplerState
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence as Running
from tokenmill.speculate import draft_model, speculator
from tokenmill.speculate.balance import Balance
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.proposer import Wish, Worth
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer

SETTINGS = {
    "defaults": Setting(),
    "small chunks and pages": Setting(max_batch_size=6, chunk_size=24, block_size=8, threads=1),
    "large pages, no sharing": Setting(max_batch_size=7, chunk_size=300, block_size=64, sharing=False, threads=3),
}
TINY = Setting(max_batch_size=6, chunk_size=48, frames=20)


class Oracle:
    """Knows the answers, and errs on purpose: so that drafts of all lengths are right, wrong, or right to some place."""

    name = "oracle"
    writes = False

    def __init__(self, pool: RequestPool, seed: int) -> None:
        self._rng = random.Random(seed)
        self._pool = pool

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        return [self._draft(wish) for wish in wishes]

    def forget(self, key: Hashable) -> None:
        pass

    def _draft(self, wish: Wish) -> Draft:
        prompt, output = tuple(wish.token_ids[: wish.prompt_len]), wish.token_ids[wish.prompt_len :]
        requests = [r for r in (*self._pool.short, *self._pool.talkative, *self._pool.long) if r.prompt == prompt]
        known = [answer.tokens for request in requests for answer in self._pool.alone.answers(request)]
        fitting = [tokens for tokens in known if tokens[: len(output)] == output] or [output]
        guess = self._rng.choice(fitting)[len(output) : len(output) + self._rng.randint(0, wish.most)]
        if guess and self._rng.random() < 0.6:
            guess[self._rng.randrange(len(guess))] = self._rng.randrange(1000)
        return Draft(tuple(guess), (0.9,) * len(guess))


@pytest.fixture
def one_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model with the weights that its file has."""
    monkeypatch.setattr(Model, "narrow", lambda model, pool: model)


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of a draft as chance will have it, whatever it costs."""
    rng = random.Random(5)

    def chosen(odds: Sequence[Sequence[float]], *_: object) -> list[int]:
        return [rng.choice((len(each), rng.randint(0, len(each)))) for each in odds]

    monkeypatch.setattr(speculator, "choose_lengths", chosen)
    monkeypatch.setattr(Worth, "floor", lambda worth, most: 0.0)
    monkeypatch.setattr(Worth, "gain", lambda worth, odds, drafting=0.0, drafts=1: float(len(odds)))
    monkeypatch.setattr(draft_model, "GAIN", 1e9)
    monkeypatch.setattr(Balance, "rests", lambda balance: False)


def ask_an_oracle(engine: Engine, pool: RequestPool) -> None:
    assert engine.speculator is not None
    engine.speculator._proposer = Oracle(pool, 3)


def drafted(engine: Engine) -> tuple[int, int]:
    """Tokens that were verified, and that were right."""
    assert engine.speculator is not None
    total = engine.speculator.total
    return sum(total.drafted), sum(total.accepted)


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


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "combined"])
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


class Alternating:
    """A mask under which digits and what parts numbers take turns. sets: uint32 words of each."""

    def __init__(self, sets: Sequence[Words]) -> None:
        self._sets = sets
        self._seen = 0

    def allowed(self) -> Words:
        return self._sets[self._seen % 2]

    def observe(self, token: int) -> None:
        assert self.allowed()[token // 32] >> token % 32 & 1, f"{token} is not allowed"
        self._seen += 1

    def retract(self, token: int) -> None:
        self._seen -= 1


@pytest.fixture
def digits_and_signs(smollm2_path: Path, pool: RequestPool, monkeypatch: pytest.MonkeyPatch) -> tuple[Tokenizer, list[Request]]:
    """Engines that are built have every sequence alternate; and requests that gladly do, and that do not."""
    tokenizer = load_tokenizer(smollm2_path)
    sets = []
    for texts in ("0123456789", (",", ";", " ", ":")):
        bits = np.zeros((pool.alone.info.vocab_size + 31) // 32 * 32, np.uint8)
        bits[[tokenizer.encode(text)[0] for text in texts]] = 1
        sets.append(np.packbits(bits, bitorder="little").view(np.uint32))
    monkeypatch.setattr("tokenmill.engine.engine.SamplerState", lambda *parts: SamplerState(*parts, Alternating(sets)))
    prompts = [tuple(tokenizer.encode(text)) for text in ("Count: 1,2,3,4,1,2,3,4,1,2,3,4,1,2,", "One, two, three. One, two,")]
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "logprobs": 1, "n": 2},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    ]
    params = [SamplingParams(seed=seed, max_tokens=40, **more) for seed, more in enumerate(settings)]
    return tokenizer, [Request(prompt, each, ()) for prompt in prompts for each in params]


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "combined"])
@pytest.mark.usefixtures("any_length", "one_mind")
def test_a_mask_sees_accepted_tokens_one_by_one(
    pool: RequestPool, smollm2_path: Path, digits_and_signs: tuple[Tokenizer, list[Request]], method: str
) -> None:
    tokenizer, requests = digits_and_signs
    mix = [Arrival(i, i, 1, "", None, None) for i in range(len(requests))]
    plain, drafting = (Setting(4, drafts=who).build(smollm2_path, {}, pool.alone.info.kv_bytes_per_token) for who in ("none", method))
    wanted, found = serve(plain, requests, mix), serve(drafting, requests, mix)
    for key, answer in found.items():
        assert re.fullmatch("([0-9][,; :]){20}", tokenizer.decode(answer.tokens))
        assert (answer.tokens, answer.logprobs) == (wanted[key].tokens, wanted[key].logprobs)
    verified, right = drafted(drafting)
    assert right > 20, (verified, right)
    assert right > 0.97 * verified or method != "draft", "the draft model goes by the same mask"


@pytest.mark.usefixtures("any_length", "one_mind")
def test_by_rejection_a_mask_holds_for_both_models(smollm2_path: Path, digits_and_signs: tuple[Tokenizer, list[Request]]) -> None:
    tokenizer, requests = digits_and_signs
    chosen = {"model": str(smollm2_path), "verify": "rejection", "num_speculative_tokens": 5}
    engine = build_engine(EngineConfig.from_settings(model=str(smollm2_path), max_batch_size=4, speculative_config=chosen))
    for answer in serve(engine, requests, [Arrival(i, i, 1, "", None, None) for i in range(len(requests))]).values():
        assert re.fullmatch("([0-9][,; :]){20}", tokenizer.decode(answer.tokens))
    verified, right = drafted(engine)
    assert right == verified > 60


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "combined"])
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


@pytest.mark.parametrize("level", ["topk_heads:0.5", "topk_positions:0.5"])
@pytest.mark.usefixtures("any_length")
def test_sparsified_and_compressed_sequences_answer_as_without_drafts(smollm2_path: Path, level: str) -> None:
    cache = kv_settings(Format.parse("int8/int4"), Sparsity.parse(level), None)
    pool = RequestPool(smollm2_path, 6, n_short=3, n_talkative=0, n_long=3, cache=cache, budgets=True)
    trial = Trial(pool.alone, Setting(max_batch_size=3, chunk_size=300, frames=300, drafts="ngram"))
    ask_an_oracle(trial.engine, pool)
    assert not (found := trial.differences([*pool.long, *pool.short], arrivals=6)), "\n".join(found)
    assert drafted(trial.engine)[1] > 20


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


METHODS = ("ngram", "suffix", "draft", "combined")


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
